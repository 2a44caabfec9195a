"""The study of conditions, at toy size."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "conditions.py"


def test_cells_have_the_loop_and_its_rivals(tmp_path):
    """Every row says where it was measured, how much was computed, and the PSNR of each prompt."""
    command = [sys.executable, str(SCRIPT), "--smoke", "--models", "demo-flux", "--output", str(tmp_path / "found")]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    series = {row["series"] for row in found["rows"]}
    rivals = {"TaylorSeer lite (diffusers)", "SeaCache", "Spectrum", "MeanCache", "HiCache", "FoCa", "DMD"}
    assert series == {"closed loop", *rivals}
    assert all(0 < row["computed"] <= 1.001 and len(row["psnr"]) == 1 for row in found["rows"])
    kinds = {(row["cell"]["guidance"], row["cell"]["strength"]) for row in found["rows"]}
    assert kinds == {(3.0, None), (None, 0.6)}
    assert (tmp_path / "found.md").read_text().count("| demo-flux") == 2 * len(kinds)
    assert (tmp_path / "found.png").exists()
