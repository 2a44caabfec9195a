"""The study of variants of the loop where few steps are computed, at toy size."""

import json
import sys

from scripts.research import few_steps
from scripts.research.few_steps_study.report import gains_of, tables
from scripts.research.few_steps_study.variants import LOOP


def test_variants_compute_other_steps(tmp_path, monkeypatch):
    """The loop leaves out the second step, so it computes less with the same target; every row has its PSNR."""
    names = [LOOP, "warm-up 2", "warm-up 3"]
    options = ["--smoke", "--no-rivals", "--models", "demo-flux", "--output", str(tmp_path / "found")]
    monkeypatch.setattr(sys, "argv", ["few_steps.py", *options, "--variants", *names])
    few_steps.main()
    found = json.loads((tmp_path / "found.json").read_text())
    computed = {row["name"]: row["computed"] for row in found["rows"]}
    assert computed["loop, target 1.6"] < computed["warm-up 2, target 1.6"] <= computed["warm-up 3, target 1.6"]
    assert {row["series"] for row in found["rows"]} == set(names)
    assert (tmp_path / "found.md").exists()


def test_gains_are_read_at_equal_work():
    """A variant that has 2 dB more (worst: 1 dB) at every computed fraction gains that much, also between targets."""
    models = ("demo-flux", "demo-wan")
    rows = [
        {
            "cell": {"model": model, "steps": 20},
            "series": series,
            "computed": computed,
            "psnr": [100 * computed + 2 * more, 100 * computed - 10 + more],
        }
        for model in models
        for series, more, places in ((LOOP, 0, (0.2, 0.5)), ("prior 2", 1, (0.22, 0.33, 0.44)))
        for computed in places
    ]
    gains = gains_of(rows, "prior 2")
    assert [tuple(round(each, 6) for each in found) for found in gains.values()] == [(1.5, 1.0)] * 2
    assert "| 20 | demo-flux | prior 2 | +1.5 / +1.0 | prior 2 |" in tables(rows)
