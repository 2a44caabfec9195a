#!/usr/bin/env python3
"""Compare the closed loop with similar methods on several models, schedules, sizes, dtypes and guidance scales.

Each combination is a cell. In each cell the presets `quality`, `balanced`, `turbo`, targets between and beyond theirs,
and other methods that forecast the transformer's output are measured; every run is compared with the plain run of the
same prompts and seeds. Prompts go through the pipeline as one batch with separate decisions; methods that decide for a
whole batch get them one by one. Writes a JSON file after every part, and at the end Markdown tables and a figure.

    python -m scripts.research.conditions --output /tmp/conditions --processes 14
    python -m scripts.research.conditions --output /tmp/conditions --models demo-textures=/tmp/demo-textures
    python -m scripts.research.conditions --output docs/results/few-steps-demo-flux --models demo-flux --few-steps 4 8 \
        --prompts 64 --rivals dbcache spectrum
    python -m scripts.research.conditions --output docs/results/eight-bits --models demo-flux demo-wan demo-hunyuan \
        --eight-bits int8 float8 --targets --rivals --processes 8
    python -m scripts.research.conditions --output docs/results/budgets --few-steps 20 28 --budgets 5 6 7 8 9 10 \
        --rivals meancache
    python -m scripts.research.conditions --output docs/results/conditions --merge /tmp/conditions*.json
"""

import argparse
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import mean
from typing import Any

import diffusers
import torch

from dit_accel import accelerated
from dit_accel.kernels.blocks.quantized_linear import LINEAR_DTYPES
from dit_accel.models import denoisers
from dit_accel.models.beside import linear_trial
from dit_accel.tools.demo import demo_path
from dit_accel.tools.measure.compare import PEERS, spread
from dit_accel.tools.measure.compare.methods import Subject
from dit_accel.tools.measure.compare.snapshot import Snapshot
from dit_accel.tools.measure.compare.solvers import SOLVERS
from dit_accel.tools.measure.compare.work import WorkCounter
from dit_accel.tools.measure.metrics import IDENTICAL, psnr
from dit_accel.tools.measure.origin import describe_run
from scripts.research.conditions_study.cells import CELLS, Cell, Conditions
from scripts.research.conditions_study.report import BUDGET, LEVELS, LOOP, Row, draw, tables
from scripts.tables import as_json, write_table

TARGETS = (0.02, 0.04, 0.1, 0.22, 0.5, 1.0)  # of `balanced`, in addition to the presets' own
RIVALS = ("taylorseer-lite", "spectrum", "meancache", "hicache", "foca", "dmd", "sea-cache")
ONE_BY_ONE = ("SeaCache", "FirstBlockCache", "DBCache", "SCM")  # series that decide for a whole batch
EIGHT_BITS = "layers in"
PARTS = 3  # parts of a cell's settings, with several processes


def measure_part(work: tuple[Cell, slice, str, argparse.Namespace]) -> list[Row]:
    """Return a row for every setting: cell, series, name, computed fraction, and PSNR in dB of each prompt."""
    cell, part, folder, options = work
    torch.set_num_threads(1)
    linear_trial.TIMED = ()  # 8 bits stay where they are slower
    conditions = Conditions(cell, folder, options.prompts, options.split, options.device)
    counter = WorkCounter(denoisers(conditions.pipe))
    with counter.calibrating():
        plain = conditions.run(conditions.prompts)
    snapshot = Snapshot(conditions.pipe)
    rows = []
    for series, name, put_on in islice(settings(conditions.subject, options), part.start, None, part.step):
        try:
            output, computed = run_setting(conditions, counter, put_on, series)
        except Exception as error:
            if series == LOOP:
                raise
            print(f"{cell}: {name}: {type(error).__name__}: {error}", flush=True)  # some caches fail in some cells
            continue
        finally:
            snapshot.restore()
        known = {key: value for key, value in asdict(cell).items() if value != getattr(Cell, key, None)}
        quality = [round(min(psnr(*pair), IDENTICAL), 2) for pair in zip(output, plain, strict=True)]
        rows.append({"cell": known, "series": series, "name": name, "computed": round(computed, 4), "psnr": quality})
        print(f"{cell}: {name}: {computed:.3f}, {mean(quality):.1f} dB, worst {min(quality):.1f}", flush=True)
    return rows


def run_setting(
    conditions: Conditions, counter: WorkCounter, put_on: Any, series: str
) -> tuple[list[torch.Tensor], float]:
    """Return the outputs of a setting, and its computed share of the plain run."""
    prompts = conditions.prompts
    output: list[torch.Tensor] = []
    computed = 0.0
    for group in [[prompt] for prompt in prompts] if series.startswith(ONE_BY_ONE) else [prompts]:
        with put_on():
            pass  # calibrates here if needed, before runs are counted
        with put_on(), counter.counting() as share:
            output += conditions.run(group)
            if series.startswith((LOOP, EIGHT_BITS)):  # whose layers in 8 bits the counter does not see
                report = conditions.pipe.dit_accel.report()
                notes = " ".join(report.notes)
                if series.startswith(EIGHT_BITS) and (f"linear {series}" not in notes or "unchanged" in notes):
                    raise RuntimeError(f"{series} were asked for, but the report says {notes}")
                return output, report.computed_fraction
            computed += share()  # share of the plain run of all prompts
    return output, computed


def settings(subject: Subject, options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Yield series, name, and a function that applies the setting to the pipeline."""
    for dtype in (None, *options.eight_bits):
        series = LOOP if dtype is None else f"{EIGHT_BITS} {dtype}"
        changes = {"per_prompt": True, "linear.dtype": dtype, **dict(options.set)}
        for level in options.levels:
            yield series, level, partial(accelerated, subject.pipe, level, **changes)
        for target in options.targets:
            put_on = partial(accelerated, subject.pipe, "balanced", target_error=target, **changes)
            yield series, f"target {target:g}", put_on
        if options.eight_bits:
            yield series, "exact", partial(accelerated, subject.pipe, "exact", **{"linear.dtype": dtype})
    changes = {"per_prompt": True, **dict(options.set)}
    for steps in options.budgets:
        yield BUDGET, f"{steps} steps", partial(accelerated, subject.pipe, "balanced", computed_steps=steps, **changes)
    for rival in options.rivals:
        for method in spread(PEERS[rival].methods(subject.steps), options.settings):
            yield method.series, method.name, partial(method.put_on, subject)


def key_value(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, json.loads(value)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the files")
    parser.add_argument(
        "--models", nargs="+", default=["demo-flux", "demo-wan", "demo-hunyuan"], help="NAME or NAME=FOLDER"
    )
    parser.add_argument("--schedulers", nargs="+", default=["Euler", *SOLVERS], help="only cells with these schedulers")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=LEVELS, help="presets of the loop")
    parser.add_argument("--targets", type=float, nargs="*", default=TARGETS)
    parser.add_argument("--settings", type=int, default=5, help="maximum number of settings per method")
    parser.add_argument("--set", type=key_value, nargs="*", default=[], help="keys of the preset, as warmup=4")
    able = [name for name in PEERS if not name.startswith("fewer-steps")]
    parser.add_argument("--rivals", nargs="*", choices=able, default=RIVALS, help="other methods")
    parser.add_argument("--few-steps", type=int, nargs="+", help="runs of so many steps instead of the cells")
    parser.add_argument("--guidance", type=float, help="true classifier-free guidance of these runs (image models)")
    parser.add_argument("--eight-bits", nargs="*", choices=LINEAR_DTYPES, default=[], help="layers in these dtypes too")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of runs of few steps")
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help="numbers of computed steps to measure too")
    parser.add_argument("--processes", type=int, default=1, help="number of parallel parts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--merge", type=Path, nargs="+", help="merge these JSON files instead of measuring")
    parser.add_argument("--smoke", action="store_true", help="quick test: one prompt, few steps, small")
    return parser.parse_args()


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the wanted cells; with `--smoke`, two small ones for each model and a small measurement."""
    models, small = list(folders_of(options)), {}
    if options.smoke:
        options.prompts, options.targets, options.settings = 1, (), 1
        small = {"size": 64, "dtype": "float32"}
    if options.few_steps:
        kind = {"guidance": options.guidance, "dtype": options.dtype, **small}
        return [Cell(m, steps=n, **kind) for m in models for n in options.few_steps]
    if options.smoke:
        kinds: list[dict[str, Any]] = [{"guidance": 3.0}, {"strength": 0.6}]
        return [Cell(name, steps=8, **small, **kind) for name in models for kind in kinds]
    return [cell for cell in CELLS if cell.model in models and cell.scheduler in options.schedulers]


def folders_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the folder of each model."""
    named = dict(name.partition("=")[::2] for name in options.models)
    return {name: folder or str(demo_path(name)) for name, folder in named.items()}


def measure(options: argparse.Namespace, cells: Sequence[Cell]) -> dict[str, Any]:
    """Measure each cell's settings, in `PARTS` parts if there are several processes."""
    diffusers.utils.logging.set_verbosity_error()
    folders = folders_of(options)
    found: dict[str, Any] = {"run": describe_run(torch.device(options.device)), "rows": []}
    found |= {"set": dict(options.set), "split": options.split}
    parts = PARTS if options.processes > 1 else 1
    work = [(cell, slice(part, None, parts), folders[cell.model], options) for cell in cells for part in range(parts)]
    start = multiprocessing.get_context("spawn").Pool if options.processes > 1 else ThreadPool  # 1: in this process
    with start(options.processes) as pool:
        for rows in pool.imap_unordered(measure_part, work):
            found["rows"] += rows
            options.output.with_suffix(".json").write_text(as_json(found))
    return found


def main() -> None:
    options = parse()
    if options.merge:
        parts = [json.loads(file.read_text()) for file in options.merge]
        found = parts[0] | {"rows": [row for part in parts for row in part["rows"]]}
    else:
        found = measure(options, cells_of(options))
    options.output.with_suffix(".json").write_text(as_json(found))
    write_table(options.output.with_suffix(".md"), tables(found["rows"]))
    draw(found["rows"], options.output.with_suffix(".png"))
    print(tables(found["rows"]))


if __name__ == "__main__":
    main()
