#!/usr/bin/env python3
"""Compare methods at 5 to 10 times less work by the content of their outputs, and not only by PSNR.

With this little work, outputs differ from the plain run's but may be as good. For every method at about the wanted
computed fractions: the share of held-out prompts whose attributes the pixel readers find correct, PSNR, SSIM and LPIPS
against the plain run, and sharpness and colours relative to it. Numbers that set the amount of work (the closed loop's
target, thresholds) are searched; settings that give another fraction are left out.

    python -m scripts.research.low_work --output /tmp/low --processes 12
    python -m scripts.research.low_work --output /tmp/low --models demo-textures=/tmp/demo-textures --processes 12
    python -m scripts.research.low_work --output /tmp/few --few-steps --processes 12

`--few-steps` measures on top of plain runs of 4, 8 and 12 steps, like distilled models, at any fraction. Prompts go
through the pipeline in batches with separate decisions; methods that decide for a batch as a whole get the first few
one by one. Writes STEM.json after each row, and at the end STEM.md and for each model a figure and a sheet.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import diffusers
import torch

from dit_accel.tools.compare import PEERS
from dit_accel.tools.demo import demo_path
from dit_accel.tools.metrics import lpips_distance
from dit_accel.tools.origin import describe_run
from scripts.research.conditions import key_value, pool_of
from scripts.research.low_work_study.report import Row, failed, figure, runs_in, sheet, tables
from scripts.research.low_work_study.runs import Case, begin, measure
from scripts.tables import write_table

FRACTIONS = (0.1, 0.12, 0.16, 0.2)  # 5, 6, 8 and 10 of 50 steps
FEW_STEPS = (4, 8, 12)
SMOKE = ["dit-accel", "sea-cache", "stack W=1 N=6 D=1", "TaylorSeer lite W=1 N=6 D=1", "5 steps"]
SMOKE += ["turbo", "stack W=1 N=2 D=1", "SeaCache 0.4 K=4", "TaylorSeer lite W=3 N=3 D=1"]  # on top of few steps


def cases(options: argparse.Namespace, store: str) -> list[Case]:
    """One case for each model, or for each model and number of few steps."""
    named = dict(name.partition("=")[::2] for name in options.models)
    few = options.few_steps is not None
    return [
        Case(
            model=name,
            folder=folder or str(demo_path(name)),
            store=store,
            steps=steps,
            size=options.size,
            fractions=() if few else tuple(options.fractions),
            prompts=options.prompts,
            batch=options.batch,
            alone=min(options.alone, options.prompts),
            split=options.split,
            dtype=options.dtype,
            device=options.device,
            peers=tuple(options.peers),
            changes=tuple(options.set),
        )
        for name, folder in named.items()
        for steps in (options.few_steps if few else [options.steps])
    ]


def found(options: argparse.Namespace, left_out: dict[str, str]) -> Iterator[Row]:
    """Yield rows as they are measured, until the time is up; ``left_out`` gets the reasons of missing methods."""
    ends = time.monotonic() + 60 * options.minutes
    with (
        tempfile.TemporaryDirectory() as store,
        pool_of(options.processes) as pool,
    ):
        tasks = []
        for case, names, rows, reasons in pool.imap(begin, cases(options, store)):
            left_out |= reasons
            tasks += [(case, name, wanted) for name, wanted in names if not options.only or name in options.only]
            yield from rows
        measured = pool.imap_unordered(_measure, tasks)
        for count in range(len(tasks)):
            try:
                yield measured.next(timeout=max(0.0, ends - time.monotonic()))
            except multiprocessing.TimeoutError:
                left_out[f"{len(tasks) - count} of {len(tasks)} tasks"] = f"{options.minutes:g} minutes were over"
                return


def _measure(task: tuple) -> Row:
    return measure(*task)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the JSON, Markdown and PNG files")
    parser.add_argument(
        "--models", nargs="+", default=["demo-flux", "demo-wan", "demo-hunyuan"], help="NAME or NAME=FOLDER"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="prompts per batch")
    parser.add_argument("--alone", type=int, default=16, help="number of prompts for methods without batches")
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS, help="wanted computed fractions")
    parser.add_argument(
        "--few-steps", type=int, nargs="*", help="on top of runs with these steps; without values 4, 8 and 12"
    )
    parser.add_argument("--steps", type=int, help="steps of the plain run; default, as for --size: the model's")
    parser.add_argument("--size", type=int, help="height and width in pixels")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument(
        "--only", nargs="+", default=[], help="names of settings and searches, of a table or in the JSON"
    )
    parser.add_argument("--set", type=key_value, nargs="*", default=[], help="keys of the loop's preset, as warmup=4")
    parser.add_argument("--sheet", type=float, default=0.12, help="computed fraction of the sheet")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit, after which the results are written")
    parser.add_argument("--smoke", action="store_true", help="quick test: one small model, prompt and fraction")
    options = parser.parse_args()
    if options.few_steps == []:
        options.few_steps = list(FEW_STEPS)
    if options.smoke:
        options.models, options.prompts, options.size, options.only = options.models[:1], 1, 64, SMOKE
        options.steps, options.fractions, options.sheet = 20, (0.25,), 0.25
    return options


def main() -> None:
    options = parse()
    diffusers.utils.logging.set_verbosity_error()
    lpips = lpips_distance(torch.device("cpu"))
    left_out = {} if callable(lpips) else {"LPIPS": lpips}
    told = {key: getattr(options, key) for key in ("split", "dtype", "size", "fractions", "few_steps")}
    document = {"run": describe_run(options.device), **told, "set": dict(options.set), "rows": []}
    rows: list[Row] = []
    started = time.monotonic()
    for row in found(options, left_out):
        rows.append(row)
        document["rows"] = [{key: value for key, value in each.items() if key != "shown"} for each in rows]
        options.output.with_suffix(".json").write_text(json.dumps(document | {"left_out": left_out}) + "\n")
        print(f"{time.monotonic() - started:4.0f} s  {row['model']}, {row['steps']}: {_line(row)}", flush=True)
    publish(rows, left_out, options)


def _line(row: Row) -> str:
    if row in failed([row]):
        return f"{row['name']}: {row['error']}"
    right = (row.get("right") or {}).get("all", "")
    return f"{row['name']}: {row['computed']:.3f} {right if 'psnr' in row else 'is too far'}"


def publish(rows: list[Row], left_out: dict[str, str], options: argparse.Namespace) -> None:
    """Write the tables, and for each model and number of steps the figure and the sheet."""
    write_table(options.output.with_suffix(".md"), tables(rows, left_out))
    few = options.few_steps is not None
    for (model, steps), own in runs_in(rows).items():
        stem = f"{options.output.name}-{model}" + (f"-{steps}-steps" if few else "")
        figure(own, options.output.with_name(f"{stem}.png"))
        sheet(own, None if few else options.sheet, options.output.with_name(f"{stem}-sheet.png"))


if __name__ == "__main__":
    main()
