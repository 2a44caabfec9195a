"""The study of conditions, at toy size."""

import json
import sys

from scripts.research import conditions


def test_cells_have_the_loop_and_its_rivals(tmp_path, monkeypatch):
    """Every row says where it was measured, how much was computed, and the PSNR of each prompt."""
    options = ["--smoke", "--models", "demo-flux", "--output", str(tmp_path / "found")]
    monkeypatch.setattr(sys, "argv", ["conditions.py", *options])
    conditions.main()
    found = json.loads((tmp_path / "found.json").read_text())
    series = {row["series"] for row in found["rows"]}
    rivals = {"TaylorSeer lite (diffusers)", "SeaCache", "Spectrum", "MeanCache", "HiCache", "FoCa", "DMD"}
    assert series == {"closed loop", *rivals}
    assert all(0 < row["computed"] <= 1.001 and len(row["psnr"]) == 1 for row in found["rows"])
    kinds = {(row["cell"]["guidance"], row["cell"]["strength"]) for row in found["rows"]}
    assert kinds == {(3.0, None), (None, 0.6)}
    assert (tmp_path / "found.md").read_text().count("| demo-flux") == 2 * len(kinds)
    assert (tmp_path / "found.png").exists()
