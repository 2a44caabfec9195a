#!/usr/bin/env python3
"""Compare one prompt per call with several: time, steps and images.

    python -m scripts.bench.prompt_batches --output docs/results/prompt_batches.json

All calls use ``balanced`` with ``schedule.per_prompt`` and the same noise. Times are medians of several rounds; each
round times every batch size. Images are compared as saved, in 8 bits.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dit_accel import accelerate_pipeline
from dit_accel.serving.loading import Loading, load_pipeline
from dit_accel.serving.prompts import batches, read_jobs
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.measure.metrics import psnr
from dit_accel.tools.measure.origin import describe_run
from dit_accel.tools.measure.timing import timed_output
from scripts.tables import as_json

MODEL = "demo-flux"
SIZES = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--side", type=int, default=256, help="pixels")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from rich.console import Console

    pipe = load_pipeline(MODEL, Loading(), Console(quiet=True))
    accelerate_pipeline(pipe, per_prompt=True)
    folder = demo_path(MODEL)
    arguments = demo_arguments(folder)
    arguments |= {"height": options.side, "width": options.side, "num_inference_steps": options.steps}
    jobs = read_jobs(folder / "prompts.txt", {})[: options.prompts]

    def make(size: int) -> tuple[float, list[Any], list[Any]]:
        """Return the seconds of all calls, and each prompt's image and report."""
        seconds, images, reports = 0.0, [], []
        for batch in batches(jobs, size):
            prompts, seeds = [job.settings["prompt"] for job in batch], [job.index for job in batch]
            output = timed_output(pipe, arguments | {"prompt": prompts}, seeds)
            seconds += output.seconds
            images += output.results
            report = pipe.dit_accel.report()
            reports += [report.of_prompt(place) for place in range(len(batch))]
        return seconds, images, reports

    make(max(SIZES))  # warms up
    rounds = [{size: make(size) for size in SIZES} for _ in range(options.rounds)]
    _, alone, references = rounds[0][1]
    rows = []
    for size in SIZES:
        _, images, reports = rounds[0][size]
        differences = [_difference(*pair) for pair in zip(alone, images, strict=True)]
        rows.append(
            {
                "batch_size": size,
                "seconds": statistics.median(item[size][0] for item in rounds),
                "seconds_each": [item[size][0] for item in rounds],
                "computed_fraction": [report.computed_fraction for report in reports],
                "same_steps": [
                    _modes(report) == _modes(first) for report, first in zip(reports, references, strict=True)
                ],
                "largest_difference": max(most for most, _ in differences),
                "psnr_db": [decibels for _, decibels in differences],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    facts = {key: getattr(options, key) for key in ("prompts", "side", "steps", "rounds")}
    threads = {"threads": torch.get_num_threads()}
    result = describe_run(pipe.device) | threads | {"model": MODEL, "preset": "balanced"} | facts | {"rows": rows}
    options.output.write_text(as_json(result), encoding="utf-8")


def _modes(report: Any) -> list[str]:
    return [step.mode for step in report.steps]


def _difference(image: Any, other: Any) -> tuple[int, float | None]:
    """Largest pixel difference (of 255 levels) and PSNR in dB, which is None for identical images."""
    first, second = (np.asarray(item) for item in (image, other))
    most = int(np.abs(first.astype(int) - second.astype(int)).max())
    return most, psnr(first, second) if most else None


if __name__ == "__main__":
    main()
