"""The file of a comparison: rows as they come, going on, and putting shards together."""

import json

import pytest

from dit_accel.errors import ComparisonError
from dit_accel.tools.measure.compare import Method, Sweep

SETTINGS = {"model": "demo-flux", "steps": 50}


def row(name, **more):
    return {"series": "s", "name": name, "ours": False, "psnr_db": 1.0, "left_behind": {}, "reloaded": False, **more}


def test_rows_outlive_the_process_and_are_not_measured_again(tmp_path):
    """A second sweep knows them; a row of the same name takes the first one's place."""
    sweep = Sweep(tmp_path / "all", SETTINGS)
    for name in "abc":
        sweep.add(row(name))
    again = Sweep(tmp_path / "all", SETTINGS)
    methods = [Method("s", name, None) for name in "abcd"]
    assert [method.name for method in again.missing(methods)] == ["d"]
    assert [method.name for method in again.missing(methods, ["b"])] == ["b", "d"]
    again.add(row("b", psnr_db=2.0))
    assert [(line["name"], line["psnr_db"]) for line in again.rows] == [("a", 1.0), ("b", 2.0), ("c", 1.0)]
    again.add(row("c", error="out of memory"))  # which may be another time
    assert [method.name for method in again.missing(methods)] == ["c", "d"]


def test_a_preset_that_was_edited_is_measured_again(tmp_path):
    """A row counts only for its recorded preset content, and a row without it for none; the new row replaces it."""
    sweep = Sweep(tmp_path / "all", SETTINGS)
    for known in (row("mine", digest="old"), row("kept", digest="same"), row("unsaid"), row("peer")):
        sweep.add(known)
    methods = [Method("s", name, None, digest=digest) for name, digest in (("mine", "new"), ("kept", "same"))]
    methods += [Method("s", "unsaid", None, digest="any"), Method("s", "peer", None)]
    assert [method.name for method in sweep.missing(methods)] == ["mine", "unsaid"]
    sweep.add(row("mine", digest="new"))
    assert [method.name for method in sweep.missing(methods)] == ["unsaid"]
    assert [line["name"] for line in sweep.rows] == ["mine", "kept", "unsaid", "peer"]


def test_shards_are_put_together_in_order(tmp_path):
    """Rows stand in the order asked for, and the document can be published; another comparison's file is refused."""
    for name in "ba":
        shard = Sweep(tmp_path / name, SETTINGS)
        shard.document["plain"] = {"repeats": True, "lpips": None}
        shard.add(row(name, error="x"))
    whole = Sweep(tmp_path / "all", SETTINGS)
    for name in "ba":
        whole.merge(tmp_path / f"{name}.json", ["a", "b"])
    assert [line["name"] for line in whole.rows] == ["a", "b"]
    assert [path.name for path in whole.publish()] == ["all.json", "all.md"]
    assert json.loads((tmp_path / "all.json").read_text())["plain"]["repeats"]
    Sweep(tmp_path / "other", {**SETTINGS, "steps": 20}).add(row("c"))
    with pytest.raises(ComparisonError, match=r"differs in steps \(steps: 20 there, 50 now\)"):
        whole.merge(tmp_path / "other.json", [])
