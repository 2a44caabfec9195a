#!/usr/bin/env python3
"""Compare variants of the closed loop where few steps are computed.

Each cell is a model, a number of steps and a schedule, as in `conditions.py`. In each cell the loop and its variants
(`few_steps_study/variants.py`) run with several targets, and methods that are strong there. Variants are compared with
the loop at equal work. Writes a JSON file after every part, and at the end Markdown tables.

    python -m scripts.research.few_steps --output /tmp/few --processes 16
    python -m scripts.research.few_steps --output /tmp/few --cells 0 12 --processes 16     # the first 12 cells only
    python -m scripts.research.few_steps --output /tmp/few --merge /tmp/few1.json /tmp/few2.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dit_accel import accelerated
from dit_accel.loop import growth
from dit_accel.tools.compare.methods import Subject
from scripts.research.conditions import key_value, measure, rivals
from scripts.research.conditions_study.cells import Cell
from scripts.research.few_steps_study.report import tables
from scripts.research.few_steps_study.variants import VARIANTS, Variant
from scripts.tables import write_table

TARGETS = (0.1, 0.16, 0.25, 0.4, 0.65, 1.0, 1.6)
RIVALS = ("meancache", "spectrum")
PARTS = 6

# The most informative cells first.
CELLS = [
    Cell("demo-flux", shift=3.0, steps=20),
    Cell("demo-flux", shift=1.5, steps=28),
    Cell("demo-wan", shift=3.0, steps=20),
    Cell("demo-hunyuan", shift=3.0, steps=20),
    Cell("demo-flux", shift=1.0, steps=12),
    Cell("demo-flux", steps=28),
    Cell("demo-wan", shift=1.5, steps=28),
    Cell("demo-hunyuan", shift=1.5, steps=28),
    Cell("demo-flux", shift=1.5, steps=50),
    Cell("demo-flux", shift=1.5, steps=20),
    Cell("demo-flux", shift=3.0, steps=28, size=256),
    Cell("demo-flux", steps=8),
    Cell("demo-flux", shift=3.0, steps=20, scheduler="UniPC"),
    Cell("demo-flux", shift=1.5, steps=28, scheduler="DPM++ 2M"),
    Cell("demo-flux", shift=4.5, steps=20, guidance=3.0),
    Cell("demo-wan", steps=12),
    Cell("demo-hunyuan", steps=12),
    Cell("demo-flux", shift=3.0, steps=50),
    Cell("demo-wan", shift=3.0, steps=50),
    Cell("demo-hunyuan", shift=3.0, steps=50),
    Cell("demo-flux", shift=3.0, steps=20, dtype="float32"),
    Cell("demo-flux", shift=3.0, steps=28, strength=0.6),
    Cell("demo-wan", steps=8),
    Cell("demo-hunyuan", steps=8),
]


def settings(subject: Subject, options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Yield series, name, and a function that applies the setting to the pipeline."""
    for target in options.targets:
        for name in options.variants:
            yield name, f"{name}, target {target:g}", partial(put_on, subject.pipe, VARIANTS[name], target, options.set)
    yield from rivals(subject, RIVALS if options.rivals else (), options.settings)


@contextmanager
def put_on(pipe: Any, variant: Variant, target: float, changes: list[tuple[str, Any]]) -> Iterator[None]:
    """Accelerate the pipeline by a variant of `balanced`."""
    own = {"target_error": target, "per_prompt": True, **variant.changes, **dict(changes)}
    with variant.in_use(), accelerated(pipe, "balanced", **own):
        yield


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the files")
    parser.add_argument(
        "--models", nargs="+", default=["demo-flux", "demo-wan", "demo-hunyuan"], help="NAME or NAME=FOLDER"
    )
    parser.add_argument(
        "--cells", type=int, nargs=2, default=(0, len(CELLS)), help="first cell, and the one to stop at"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="tuning")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS)
    parser.add_argument("--settings", type=int, default=5, help="maximum number of settings per method")
    parser.add_argument("--set", type=key_value, nargs="*", default=[], help="keys of the preset, as max_interval=8")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help="only the closed loop")
    parser.add_argument("--processes", type=int, default=1, help="number of parallel parts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no part starts later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--merge", type=Path, nargs="+", help="merge these JSON files instead of measuring")
    parser.add_argument("--smoke", action="store_true", help="quick test: one prompt, 8 steps, small")
    parser.set_defaults(growth=growth.GROWTH)
    return parser.parse_args()


def wanted(options: argparse.Namespace) -> list[Cell]:
    """Return the cells; with `--smoke`, one small cell for each model and a small measurement."""
    models = [name.partition("=")[0] for name in options.models]
    if options.smoke:
        options.prompts, options.targets, options.settings = 1, (0.1, 1.6), 1
        return [Cell(name, steps=8, size=64, dtype="float32") for name in models]
    return [cell for cell in CELLS[slice(*options.cells)] if cell.model in models]


def main() -> None:
    options = parse()
    if options.merge:
        parts = [json.loads(file.read_text()) for file in options.merge]
        found = parts[0] | {"rows": [row for part in parts for row in part["rows"]]}
    else:
        found = measure(options, wanted(options), settings, PARTS)
    options.output.with_suffix(".json").write_text(json.dumps(found) + "\n")
    write_table(options.output.with_suffix(".md"), tables(found["rows"]))
    print(tables(found["rows"]))


if __name__ == "__main__":
    main()
