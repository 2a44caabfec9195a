"""The sweep over the demo models: its methods, its shards, and its single final document."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from dit_accel.tools.measure.compare import Method, Sweep
from scripts.research import pareto

METHODS = [Method(series, f"{series}-{number}", lambda subject: nullcontext({})) for series in "ab" for number in "123"]


def test_shards_hold_every_method_once():
    """Together they are the whole sweep, each with some of every series."""
    parts = [pareto.chosen(METHODS, [], (part, 2)) for part in (1, 2)]
    assert sorted(method.name for part in parts for method in part) == sorted(method.name for method in METHODS)
    assert all({method.series for method in part} == {"a", "b"} for part in parts)


def test_methods_are_chosen_by_name_or_series():
    assert [method.name for method in pareto.chosen(METHODS, ["a-2", "b"], (1, 1))] == ["a-2", "b-1", "b-2", "b-3"]
    with pytest.raises(SystemExit, match="--only names no method or series: c; there are: a, a-1"):
        pareto.chosen(METHODS, ["c"], (1, 1))


def test_rows_of_an_edited_preset_are_not_timed(tmp_path, capsys):
    """Their figures are another preset's; they are named, and keep their time."""
    sweep = Sweep(tmp_path / "all", {})
    for name in ("mine", "kept"):
        sweep.add({"name": name, "digest": "old", "seconds": 1.0})
    methods = [Method("s", "mine", None, digest="new"), Method("s", "kept", None, digest="old")]
    pareto.retime(SimpleNamespace(retime=lambda method: {"seconds": 2.0}), sweep, methods, None)
    assert [row["seconds"] for row in sweep.rows] == [1.0, 2.0] and "mine: not timed" in capsys.readouterr().out


def test_a_sweep_in_shards_becomes_one_document(tmp_path, monkeypatch):
    """Two shards, their merging, and times measured again: one JSON file with its tables and plots."""
    small = ["--steps", "4", "--height", "64", "--width", "64", "--prompts", "1", "--device", "cpu"]
    few = ["--peers", "fewer-steps", "--only", "turbo", "2 steps"]

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["pareto.py", *small, *few, "--output", str(tmp_path / "all"), *arguments])
        pareto.main()

    for part in ("1/2", "2/2"):
        main("--shard", part)
    assert {path.name for path in tmp_path.iterdir()} == {"all-shard-1of2.json", "all-shard-2of2.json"}
    main("--merge")
    assert {path.name for path in tmp_path.iterdir()} == {"all.json", "all.md", "all.png", "all-time.png"}
    merged = json.loads((tmp_path / "all.json").read_text())
    assert [row["name"] for row in merged["results"]] == ["turbo", "2 steps"]
    main("--retime")
    timed = json.loads((tmp_path / "all.json").read_text())
    assert [row["psnr_db"] for row in timed["results"]] == [row["psnr_db"] for row in merged["results"]]
    assert [row["seconds"] for row in timed["results"]] != [row["seconds"] for row in merged["results"]]
