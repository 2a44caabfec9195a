"""The study of conditions, at toy size."""

import json
import sys

from dit_accel.presets.loading import LEVELS
from scripts.research import conditions


def test_cells_have_the_loop_and_its_rivals(tmp_path, monkeypatch):
    """Every row says where it was measured, how much was computed, and the PSNR of each prompt."""
    options = ["--smoke", "--models", "demo-flux", "--budgets", "4"]
    options += ["--rivals", "taylorseer-lite", "sea-cache", "meancache"]
    monkeypatch.setattr(sys, "argv", ["conditions.py", *options, "--output", str(tmp_path / "found")])
    conditions.main()
    found = json.loads((tmp_path / "found.json").read_text())
    series = {row["series"] for row in found["rows"]}
    rivals = {"TaylorSeer lite (diffusers)", "SeaCache", "MeanCache"}
    assert series == {"closed loop", "closed loop with a budget", *rivals}
    assert all(0 < row["computed"] <= 1.001 and len(row["psnr"]) == 1 for row in found["rows"])
    kinds = {(row["cell"].get("guidance"), row["cell"].get("strength")) for row in found["rows"]}
    assert kinds == {(3.0, None), (None, 0.6)}
    assert (tmp_path / "found.md").read_text().count("| demo-flux") == 2 * len(kinds)
    assert (tmp_path / "found.png").exists()


def test_few_steps_have_layers_in_8_bits(tmp_path, monkeypatch):
    """Runs of a few steps are repeated with layers in 8 bits, with the loop and without."""
    options = ["--smoke", "--models", "demo-flux", "--few-steps", "4", "--eight-bits", "int8", "--rivals", "sea-cache"]
    monkeypatch.setattr(sys, "argv", ["conditions.py", *options, "--output", str(tmp_path / "few")])
    conditions.main()
    rows = [row for row in json.loads((tmp_path / "few.json").read_text())["rows"] if row["cell"]["steps"] == 4]
    assert {row["series"] for row in rows} == {"closed loop", "layers in int8", "SeaCache"}
    assert {row["name"] for row in rows if row["series"] == "layers in int8"} == {"exact", *LEVELS}
