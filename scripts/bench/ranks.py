#!/usr/bin/env python3
"""Time full-size transformers with random weights, plain and accelerated, on one GPU and on all GPUs of torchrun.

    torchrun --nproc-per-node 2 scripts/bench/ranks.py --output docs/results/parallel
    torchrun --nproc-per-node 2 scripts/bench/ranks.py --models flux --seconds 120
    torchrun --nproc-per-node 2 scripts/bench/ranks.py --smoke     # the same paths on the CPU, at toy size

Several GPUs share the tokens of a call (diffusers' Ulysses) or run one guidance branch each. A row that fails has its
error instead of times; rows after the time limit are marked as skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dit_accel import Preset, load_preset
from dit_accel.models.parallel.branches import GROUP
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.model_speed.bench import STEPS, Bench
from scripts.bench.model_speed.models import MODELS, TINY
from scripts.bench.model_speed.ranks import join, on_any, share_tokens
from scripts.bench.model_speed.runs import TILED_STEPS, fixed
from scripts.tables import names_in, write_result

CHOSEN = ("flux", "qwen-image", "flux2", "wan-1.3b", "hunyuan")
KEPT = (
    *("ms", "seconds", "ms_by_mode", "transformer_ms_by_mode", "steps_by_mode", "replayed", "not_captured", "notes"),
    *("fallbacks", "peak_gib"),
)
COLUMNS = {"ms": "{:.1f}", "over_plain": "{:.2f}×", "over_one": "{:.2f}×", "relative_error": "{:.1e}"}
HEADER = """\
| | | ms | speed-up over plain, equal devices | speed-up over one device | relative error |
|---|---|---|---|---|---|"""
MEANING = """\
ms: per computed step, all branches; for a run of 50 steps per average step. Relative error: ‖v − v'‖ / ‖v'‖ of one
velocity, v' that of the plain run on one device. On several devices HunyuanVideo's plain run masks the wrong text
tokens, because diffusers' token exchange moves them; only its time is valid."""
Row = dict[str, Any]


def main() -> int:
    options = _options()
    started = time.perf_counter()
    with ExitStack() as stack:
        rank, ranks = join(options.smoke, stack)
        table = Table(options, started, rank, ranks)
        for name in options.models:
            measure(name, options.smoke, table)
        if rank == 0:
            print(markdown(table.document))
            if options.output is not None:
                print(f"wrote {options.output}.json and {options.output.name}.md")
    return 0


def measure(name: str, smoke: bool, table: Table) -> None:
    """Add all rows of a model: one device, shared tokens, then one branch per device."""
    bench: list[Bench] = []

    def build() -> None:
        bench.append(Bench((TINY if smoke else MODELS)[name], "cpu" if smoke else "cuda"))

    if not table.run(name, "building", build, shown=False):
        return
    (model,) = bench
    for run, timed in RUNS.items():
        table.run(f"{name}, {_count(1)}", run, partial(timed, model))
    velocity = getattr(model, "velocity", None)  # plain run on one device
    if "CFG" in model.model.variants:
        for devices in (1, table.ranks):
            setattr(model.transformer, GROUP, dist.group.WORLD if devices > 1 else None)
            for run, timed in GUIDED.items():
                table.run(f"{name}, {_count(devices)}", run, partial(timed, model.variant("CFG")))
        delattr(model.transformer, GROUP)
    if table.run(name, "sharing the tokens", partial(share_tokens, model.transformer, table.ranks, smoke), shown=False):
        for run, timed in (RUNS | OF_SEVERAL | (OF_CLIPS if model.model.is_video else {})).items():
            table.run(f"{name}, {_count(table.ranks)}", run, partial(_compared, timed, model, velocity))
    bench.clear()
    del model, timed
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def exact(bench: Bench) -> Row:
    """Time computed steps with fused kernels."""
    return bench.accelerated("", load_preset("exact"), 4)


def fifty(bench: Bench, name: str | Preset, tiles: float = 1.0) -> Row:
    """Time a run of 50 steps of which 14 are computed."""
    preset = fixed(name, warmup=4, interval=5, cooldown=1)
    return bench.accelerated("", preset, STEPS, tiles=tiles, warm=20, whole=True)


def half_tiles(bench: Bench) -> Row:
    """Time computed steps that skip a random half of the tiles."""
    return bench.accelerated("", fixed(bench.model.sparse, warmup=1, interval=2, cooldown=0), TILED_STEPS, tiles=0.5)


RUNS: dict[str, Callable[[Bench], Row]] = {
    "plain": Bench.plain,
    "exact": exact,
    f"14 of {STEPS} steps": partial(fifty, name="balanced"),
    "half of the tiles": half_tiles,
}
GUIDED: dict[str, Callable[[Bench], Row]] = {  # both branches; with several devices one each
    "two branches, exact": exact,
    f"two branches, 14 of {STEPS} steps": partial(fifty, name="balanced"),
}
OF_SEVERAL: dict[str, Callable[[Bench], Row]] = {
    "exact, no CUDA graphs": lambda bench: bench.accelerated("", load_preset("exact", graphs="never"), 4, warm=1)
}
OF_CLIPS = {f"14 of {STEPS} steps, half of the tiles": lambda bench: fifty(bench, bench.model.sparse, tiles=0.5)}


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def _compared(timed: Callable[[Bench], Row], bench: Bench, velocity: torch.Tensor | None) -> Row:
    """Time a row on several devices; if it computes everything, add the distance of its velocity from ``velocity``."""
    row = timed(bench)
    if velocity is None or timed not in (Bench.plain, exact):
        return row
    found, bench.velocity = bench.velocity, velocity
    error = bench.error_of(found) if timed is Bench.plain else bench.relative_error(load_preset("exact"))
    return row | {"relative_error": error}


class Table:
    """Rows so far, written after each; all ranks run it, and the first one writes."""

    def __init__(self, options: argparse.Namespace, started: float, rank: int, ranks: int) -> None:
        self.ranks = ranks
        self._rank, self._options, self._started = rank, options, started
        self._rows: list[Row] = []
        self._facts = describe_run("cpu" if options.smoke else "cuda") | {"devices": ranks}

    def run(self, of: str, name: str, timed: Callable[[], Row], *, shown: bool = True) -> bool:
        """Add a row, or the reason why a rank could not measure it; return True if it was measured."""
        out_of_time = on_any(time.perf_counter() - self._started > self._options.seconds)
        error = "skipped: the time is up" if out_of_time else None
        row: Row = {}
        if error is None:
            try:
                measured = timed() or {}
                row = {key: measured[key] for key in (*KEPT, "relative_error") if key in measured}
            except Exception as problem:  # any failure; go on with the other rows
                text = str(problem).strip().splitlines()
                error = f"{type(problem).__name__}: {text[0] if text else ''}"
        failed = on_any(error is not None)
        if failed and error is None:
            error = "another rank failed"
        if shown or failed:
            row = {"of": of, "run": name, **({"error": error} if failed else row)}
            self._rows.append(row)
            self._write(row)
        return not failed

    def _compare(self) -> None:
        measured = {(row["of"], row["run"]): row["ms"] for row in self._rows if "ms" in row}
        for row in self._rows:
            alone = f"{row['of'].split(',')[0]}, {_count(1)}"
            plain, one = measured.get((row["of"], "plain")), measured.get((alone, row["run"]))
            if "ms" in row and plain:
                row["over_plain"] = plain / row["ms"]
            if "ms" in row and one and row["of"] != alone:
                row["over_one"] = one / row["ms"]

    def _write(self, row: Row) -> None:
        if self._rank != 0:
            return
        self._compare()
        print(json.dumps({key: value for key, value in row.items() if key != "notes"}), flush=True)
        write_result(self._options.output, self.document, markdown(self.document))

    @property
    def document(self) -> dict[str, Any]:
        return self._facts | {"seconds": time.perf_counter() - self._started, "rows": self._rows}


def markdown(document: dict[str, Any]) -> str:
    """Rows as a Markdown table, below the machine and versions."""
    lines = [
        f"# Parallel speed, {document['devices']} × {document['device']}",
        "",
        f"torch {document['torch']}, diffusers {document['diffusers']}, random weights: `{document['command']}`",
        "",
        HEADER,
    ]
    for row in document["rows"]:
        cells = (form.format(row[key]) if key in row else "" for key, form in COLUMNS.items())
        lines.append(f"| {row['of']} | {row['run']} | {row.get('error') or ' | '.join(cells)} |")
    return "\n".join([*lines, "", MEANING]) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_in(MODELS), default=CHOSEN, help="models, comma-separated")
    parser.add_argument("--seconds", type=float, default=330.0, help="no row starts later; default %(default)s")
    parser.add_argument("--output", type=Path, help="stem of the .json and .md files, written after every row")
    parser.add_argument("--smoke", action="store_true", help="toy size, on the CPU")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 …")
    return options


if __name__ == "__main__":
    sys.exit(main())
