#!/usr/bin/env python3
"""The closed loop and its nearest rivals on several models, schedules, sizes and dtypes, cell by cell.

A cell is a model under one scheduler, flow shift, number of steps, size and dtype. In each cell the target of
`balanced` is swept, and so are TaylorSeer lite and SeaCache; every run is compared with the plain run of the same
prompts and seeds. Prompts go through the pipeline as one batch, and each is decided by itself (SeaCache, which decides
for a batch as a whole, gets them one by one). Writes a JSON file and a Markdown table.

    python scripts/conditions.py --output /tmp/conditions --processes 12
    python scripts/conditions.py --output /tmp/conditions --models demo-textures=/tmp/demo-textures --growth 0.5
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import diffusers
import numpy as np
import torch
from demo_models import clips
from demo_models import prompts as pictures
from demo_models.exporting import paint
from demo_models.texture_demo import MixedDemo, TextureDemo
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from dit_accel import accelerated
from dit_accel.loop import growth
from dit_accel.models import denoisers
from dit_accel.tools.bench.origin import describe_run
from dit_accel.tools.compare.caches import CACHES
from dit_accel.tools.compare.methods import Subject
from dit_accel.tools.compare.solvers import SOLVERS, solver_over
from dit_accel.tools.compare.work import WorkCounter
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.metrics import psnr

TARGETS = (0.05, 0.1, 0.2, 0.4)
RIVALS = ("taylorseer-lite", "sea-cache")
ONE_BY_ONE = "SeaCache"
FRACTIONS = (0.25, 0.3, 0.35, 0.4)
HELD_OUT = {
    "demo-flux": pictures.held_out_prompts,
    "demo-textures": TextureDemo.held_out,
    "demo-mixed": MixedDemo.held_out,
    "demo-wan": clips.held_out_prompts,
    "demo-hunyuan": clips.held_out_prompts,
}


@dataclass(frozen=True)
class Cell:
    """Conditions of a run; None = the model's own."""

    model: str
    shift: float | None = None
    steps: int | None = None
    size: int | None = None
    dtype: str = "bfloat16"
    scheduler: str = "Euler"

    def __str__(self) -> str:
        shift, size = f"shift {self.shift or 'own'}", self.size and f"{self.size}²"
        solver = self.scheduler != "Euler" and self.scheduler
        return ", ".join(
            part for part in (self.model, solver, shift, size, self.steps and f"{self.steps} steps", self.dtype) if part
        )


CELLS = [
    Cell("demo-flux", shift=1.5),
    Cell("demo-flux", shift=4.5),
    Cell("demo-flux", shift=3.0, size=256),
    Cell("demo-flux", shift=1.5, dtype="float32"),
    Cell("demo-flux", shift=1.5, steps=28),
    Cell("demo-textures"),
    Cell("demo-textures", shift=3.0),
    Cell("demo-textures", shift=1.0, steps=28),
    Cell("demo-mixed"),
    Cell("demo-mixed", shift=4.5, size=256),
    Cell("demo-wan", shift=7.0),
    Cell("demo-wan", shift=3.0),
    Cell("demo-hunyuan", shift=7.0),
    Cell("demo-hunyuan", shift=3.0),
    *(
        Cell(model, shift=shift, size=256, dtype="float32", scheduler=scheduler)
        for model, shift in (("demo-flux", 3.0), ("demo-wan", 7.0))
        for scheduler in SOLVERS
    ),
]

Row = dict[str, Any]


def measure_cell(cell: Cell, folder: str, options: argparse.Namespace) -> list[Row]:
    """A row for every setting: cell, series, name, computed fraction, and PSNR in dB of each prompt."""
    torch.set_num_threads(1)
    growth.GROWTH = options.growth
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=getattr(torch, cell.dtype)).to(options.device)
    pipe.set_progress_bar_config(disable=True)
    if cell.shift is not None:
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=cell.shift)
    if cell.scheduler != "Euler":
        pipe.scheduler = solver_over(pipe.scheduler, cell.scheduler)
    given = {"num_inference_steps": cell.steps, "height": cell.size, "width": cell.size}
    arguments = demo_arguments(Path(folder)) | {key: value for key, value in given.items() if value is not None}
    prompts = HELD_OUT[cell.model](options.prompts, options.split)
    counter = WorkCounter(denoisers(pipe))
    with counter.calibrating():
        plain = run(pipe, arguments, prompts)
    subject = Subject(pipe, arguments["num_inference_steps"], 1, lambda: None)
    rows = []
    for series, name, put_on in settings(subject, options):
        groups = [[prompt] for prompt in prompts] if series == ONE_BY_ONE else [prompts]
        made, shares = [], []
        for group in groups:
            with put_on(), counter.counting() as share:
                made += run(pipe, arguments, group)
                shares.append(share())  # of the plain run's, which was of all prompts
        computed = sum(shares)
        quality = [round(psnr(*pair), 2) for pair in zip(made, plain, strict=True)]
        rows.append(
            {"cell": asdict(cell), "series": series, "name": name, "computed": round(computed, 4), "psnr": quality}
        )
        print(f"{cell}: {name}: {computed:.3f}, {mean(quality):.1f} dB, worst {min(quality):.1f}", flush=True)
    return rows


def settings(subject: Subject, options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Series, name, and what puts a setting on the pipeline."""
    for target in options.targets:
        changes = {"target_error": target, "per_prompt": True, **dict(options.set)}
        yield "closed loop", f"target {target:g}", partial(accelerated, subject.pipe, "balanced", **changes)
    for rival in RIVALS if options.rivals else ():
        for method in CACHES[rival].methods(subject.steps):
            yield method.series, method.name, partial(method.put_on, subject)


def run(pipe: Any, arguments: dict[str, Any], prompts: Sequence[Any]) -> torch.Tensor:
    """What the pipeline makes of prompts in one batch, values 0..1."""
    call = dict(arguments)
    each = {"negative_prompt": call.pop("negative_prompt")} if "negative_prompt" in call else None
    return paint(pipe, list(prompts), batch=len(prompts), each=each, **call).clamp(0, 1)


def table(rows: Sequence[Row]) -> str:
    """PSNR of the loop at fractions, mean / worst prompt, and its lead over the best rival at no more work."""
    lines = ["| cell | " + " | ".join(f"{share:g}" for share in FRACTIONS) + " |", "|---" * (len(FRACTIONS) + 1) + "|"]
    cells = list(dict.fromkeys(json.dumps(row["cell"]) for row in rows))
    for key in cells:
        own = [row for row in rows if json.dumps(row["cell"]) == key]
        entries = []
        for share in FRACTIONS:
            ours = [at(own, share, statistic) for statistic in (mean, min)]
            best = [best_rival(own, share, statistic) for statistic in (mean, min)]
            leads = [f"{a - b:+.1f}" if b is not None else "" for a, b in zip(ours, best, strict=True) if a is not None]
            entries.append(f"{ours[0]:.1f} / {ours[1]:.1f} ({', '.join(leads)})" if ours[0] is not None else "")
        lines.append(f"| {Cell(**json.loads(key))} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def at(rows: Sequence[Row], share: float, statistic: Any) -> float | None:
    """The loop's dB at a computed fraction, between the targets measured; None beyond them."""
    points = sorted((row["computed"], statistic(row["psnr"])) for row in rows if row["series"] == "closed loop")
    if not points or not points[0][0] <= share <= points[-1][0]:
        return None
    return float(np.interp(share, *zip(*points, strict=True)))


def best_rival(rows: Sequence[Row], share: float, statistic: Any) -> float | None:
    """The most dB of any other setting that computes no more."""
    others = [row for row in rows if row["series"] != "closed loop" and row["computed"] <= 1.02 * share]
    return max((statistic(row["psnr"]) for row in others), default=None)


def key_value(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, json.loads(value)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the JSON and Markdown files")
    parser.add_argument(
        "--models", nargs="+", default=["demo-flux", "demo-wan", "demo-hunyuan"], help="NAME or NAME=FOLDER"
    )
    parser.add_argument("--schedulers", nargs="+", default=["Euler", *SOLVERS], help="cells of these alone")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="tuning")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS)
    parser.add_argument("--growth", type=float, default=growth.GROWTH, help="the exponent of dit_accel.loop.growth")
    parser.add_argument("--set", type=key_value, nargs="*", default=[], help="keys of the preset, as warmup=4")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help="the closed loop alone")
    parser.add_argument("--processes", type=int, default=1, help="cells that are measured at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="one prompt, few steps, small, to see that it runs")
    return parser.parse_args()


def main() -> None:
    options = parse()
    diffusers.utils.logging.set_verbosity_error()
    named = dict(name.partition("=")[::2] for name in options.models)
    folders = {name: folder or str(demo_path(name)) for name, folder in named.items()}
    cells = [cell for cell in CELLS if cell.model in folders and cell.scheduler in options.schedulers]
    if options.smoke:
        cells = [Cell(name, steps=8, size=64, dtype="float32") for name in folders]
        options.prompts, options.targets = 1, options.targets[:1]
    work = [(cell, folders[cell.model], options) for cell in cells]
    if options.processes > 1:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            found = pool.starmap(measure_cell, work, chunksize=1)
    else:
        found = [measure_cell(*each) for each in work]
    rows = [row for part in found for row in part]
    origin = describe_run(torch.device(options.device))
    told = {"growth": options.growth, "set": dict(options.set), "split": options.split}
    options.output.with_suffix(".json").write_text(json.dumps({"run": origin, **told, "rows": rows}) + "\n")
    options.output.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
