"""The script that measures the papers' tables again: its presets, its masks, and a small run of it."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from scripts.research import paper_tables
from scripts.research.paper_study import tuned
from scripts.research.paper_study.flips import SLICES, Flips
from scripts.research.paper_study.settings import MODELS, rows


@pytest.mark.parametrize("model", MODELS)
def test_every_row_is_a_preset(model):
    """The preset has the values in the paper's name for the row."""
    listed = rows(model)
    assert len({(row.source, row.name) for row in listed}) == len(listed)
    for row in listed:
        preset = row.load(model)
        if row.name.startswith("FlashOmni ("):
            tau_q, tau_kv, interval, order, share = row.name.partition("(")[2].partition(")")[0].split(", ")
            assert f"{preset.reuse.tau_q:.0%}, {preset.skip.tau_kv:.0%}" == f"{tau_q}, {tau_kv}"
            assert [preset.schedule.interval, preset.forecast.order] == [int(interval), int(order)]
            assert f"{preset.reuse.degrade_below:.0%}" == share


def test_keys_that_come_to_matter_are_counted():
    """All queries need one of three keys five steps later; no query needs any of them at first."""
    flips, keys = Flips(), torch.eye(4).repeat(32, 1)[None, :, None]  # [1, 128, 1, 4]
    for step, wanted in ((0, 0), (3, 2), (5, 1)):
        queries = 40 * torch.eye(4)[wanted].expand(1, 128, 1, 4)
        flips.visit(SimpleNamespace(block="a", step=step), queries, keys, keys)
    results = flips.results()
    assert [each["slice"] for each in results] == list(SLICES)
    assert all(each["steps"] == "0 to 5" and each["flipped"] == pytest.approx(1 / 3) for each in results)


def test_branches_are_not_compared_with_each_other():
    flips, keys = Flips(), torch.eye(4).repeat(32, 1)[None, :, None]
    for step in (0, 5):
        for wanted in (0, 1):  # two branches that want two keys, the same ones in every step
            queries = 40 * torch.eye(4)[wanted].expand(1, 128, 1, 4)
            flips.visit(SimpleNamespace(block="a", step=step), queries, keys, keys)
    assert all(each["steps"] == "0 to 5" and each["flipped"] == 0 for each in flips.results())


def test_a_small_run_writes_tables(tmp_path, monkeypatch):
    arguments = ["--model", "demo-wan", "--prompts", "1", "--steps", "6", "--height", "64", "--width", "64"]
    only = ["--only", "FG-Attn", "SpargeAttn", "--output", str(tmp_path / "papers")]
    monkeypatch.setattr(tuned, "SAMPLES", 1)
    monkeypatch.setattr(tuned, "UNTUNED", tuned.UNTUNED[:2])
    monkeypatch.setattr(sys, "argv", ["paper_tables.py", *arguments, *only])
    paper_tables.main()
    document = json.loads((tmp_path / "papers.json").read_text())
    names = [each["name"] for each in document["results"]]
    assert names[1] == "FG-Attn-pooling" and any(name.startswith("tuned") for name in names)
    assert all(len(each["attended"]) == 6 and 0 <= each["sparsity"] < 1 for each in document["results"])
    written = (tmp_path / "papers.md").read_text()
    assert "figure 9" in written and "| FG-Attn-pooling |" in written and (tmp_path / "papers.png").exists()
