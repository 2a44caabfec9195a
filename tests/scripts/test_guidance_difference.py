"""The study of loops that leave the second branch of guidance out, at toy size."""

import json
import sys

from scripts.research import guidance_difference


def test_the_second_branch_is_left_out(tmp_path, monkeypatch):
    """A tail computes less than forecasts of the difference that compute both branches; every row has its PSNR."""
    options = ["--models", "demo-flux", "--steps", "8", "--size", "64", "--dtype", "float32", "--prompts", "1"]
    monkeypatch.setattr(
        sys, "argv", ["guidance.py", "--output", str(tmp_path / "found"), *options, "--targets", "0.1", "0.4"]
    )
    guidance_difference.main()
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    computed = {row["name"]: row["computed"] for row in rows}
    assert computed["tail 0.50, target 0.1"] < computed["difference, target 0.1"]
    assert computed["share 1, target 0.4"] <= computed["difference, target 0.4"]
    assert {row["series"] for row in rows} == set(guidance_difference.VARIANTS)
