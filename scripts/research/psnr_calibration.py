#!/usr/bin/env python3
"""Calibrate `target_psnr`: which PSNR 90% of the prompts reach with each target error, on models that were measured.

    python -m scripts.research.psnr_calibration        # reads docs/results/conditions.json

Prints the pairs of `schedule.calibration` in configs/balanced.yaml and configs/video-balanced.yaml, and what they cover
on a model that is left out. A pair has the lowest PSNR of all models (with it or a smaller target error), and a model's
PSNR is the bound of split conformal prediction over the prompts of its conditions.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dit_accel.presets import default_preset, load_preset
from dit_accel.tools.measure.tune.result import conformal

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "conditions.json"
VIDEOS = ("demo-wan", "demo-hunyuan")
COVERAGE = 0.9
LEVELS = (30, 35, 40, 45)  # dB
LEAST = 25  # dB; presets have no pairs below


class Run(NamedTuple):
    """Runs of one condition with one target error: mean computed share of the FLOPs, and PSNR of each prompt, dB."""

    model: str
    target: float
    computed: float
    psnr: list[float]


Pairs = list[tuple[float, float]]


def runs(rows: Sequence[dict[str, Any]]) -> list[Run]:
    """Runs of the closed loop."""
    found = []
    for row in rows:
        if row["series"] == "closed loop":
            model, name = row["cell"]["model"], row["name"]
            preset = default_preset(name, is_video=model in VIDEOS)
            target = float(name.split()[1]) if name.startswith("target") else load_preset(preset).schedule.target_error
            found.append(Run(model, target, row["computed"], row["psnr"]))
    return found


def reached(found: Sequence[Run], target: float) -> float:
    """PSNR that an unseen prompt reaches with probability `COVERAGE`, on the worst model."""
    models = {run.model for run in found}
    values = [
        [psnr for run in found if (run.model, run.target) == (model, target) for psnr in run.psnr] for model in models
    ]
    return min(conformal(item, COVERAGE) for item in values)


def calibration(found: Sequence[Run]) -> Pairs:
    """Pairs of a target error and a PSNR in dB, rounded down; of equal PSNRs the largest target error stays."""
    pairs: Pairs = []
    least = float("inf")
    for target in sorted({run.target for run in found}):
        least = min(least, int(10 * reached(found, target)) / 10)
        pairs = [pair for pair in pairs if pair[1] > least] + [(target, least)]
    return [pair for pair in pairs if pair[1] >= LEAST]


def chosen(pairs: Pairs, level: float) -> float | None:
    return max((target for target, psnr in pairs if psnr >= level), default=None)


def left_out(found: Sequence[Run]) -> list[str]:
    """Rows of a table: what the others' calibration covers on each model, and what its own would cost."""
    lines = []
    for model in sorted({run.model for run in found}):
        of_model, others = [run for run in found if run.model == model], [run for run in found if run.model != model]
        pairs, pairs_alone, entries = calibration(others), calibration(of_model), []
        for level in LEVELS:
            target, known = chosen(pairs, level), chosen(pairs_alone, level)
            if target is None:
                entries.append("—")
                continue
            runs_at = [run for run in of_model if run.target == target]
            psnr = [item >= level for run in runs_at for item in run.psnr]
            work = sum(run.computed for run in runs_at) / len(runs_at)
            least = [run.computed for run in of_model if run.target == known]
            instead = f"{sum(least) / len(least):.2f}" if least else "1.00"
            entries.append(f"{sum(psnr) / len(psnr):.0%}, {work:.2f} ({instead})")
        lines.append(f"| `{model}` | " + " | ".join(entries) + " |")
    return lines


def main() -> None:
    found = runs(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"])
    for name, of_videos in (("balanced", False), ("video-balanced", True)):
        kind = [run for run in found if (run.model in VIDEOS) == of_videos]
        print(name, *calibration(kind))
        print(*left_out(kind), sep="\n")


if __name__ == "__main__":
    main()
