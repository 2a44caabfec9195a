#!/usr/bin/env python3
"""Check CUDA graphs of computed steps on one GPU, and measure what they save: random weights, under 4 minutes.

    python -m scripts.checks.graphs --output graphs.json
    python -m scripts.checks.graphs --models flux --seconds 60
    python -m scripts.checks.graphs --models flux --one-core           # shares its core with a busy process
    torchrun --nproc-per-node 2 scripts/checks/graphs.py --models flux # GPUs share the tokens
    python -m scripts.checks.graphs --smoke                            # the same paths at toy size, on the CPU

Each row runs the same steps without and with graphs, which are replayed from the fourth step on. A row that fails
prints its traceback, and the others continue.
"""

import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch

from dit_accel import Preset, accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.model_speed.bench import Bench, busy_and_span
from scripts.bench.model_speed.measures import peak_memory, profiled, stopwatch
from scripts.bench.model_speed.models import MODELS, TINY
from scripts.bench.model_speed.ranks import join, on_any, share_tokens
from scripts.checks.graphs_study import situations
from scripts.tables import as_json
from tests.tiny import tiny_output, tiny_pipeline

BEFORE = 3  # steps: warm-up, watched step, capture
TIMED = {"flux": 6, "flux-2048": 3, "qwen-image": 6, "flux2-klein-4b": 6, "wan-1.3b": 3, "hunyuan": 2}  # replayed steps
FAMILIES = ("flux", "sd3", "wan", "hunyuan", "qwen-image", "cogvideox", "mochi", "ltx")  # at toy size
WANTED = ("never", "always", "auto")
DENSITIES = {"50% of tiles left out": 0.5, "80% of tiles left out": 0.2, "exact": 1.0}


def main() -> int:
    options = _options()
    if options.one_core:
        core = {min(os.sched_getaffinity(0))}  # shared with a process that is always busy, as on a slow host
        os.sched_setaffinity(0, core)
        atexit.register(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
    diffusers.utils.logging.set_verbosity_error()
    device = "cpu" if options.smoke else "cuda"
    started, rows = time.perf_counter(), []
    with ExitStack() as stack:
        rank, ranks = join(options.smoke, stack) if "RANK" in os.environ else (0, 1)
        results = {**describe_run(device), "devices": ranks, "rows": rows}
        for what, measure in checks(options.models, options.smoke, ranks):
            is_over = time.perf_counter() - started > options.seconds
            if on_any(is_over) if ranks > 1 else is_over:
                rows.append({"check": what, "skipped": f"{options.seconds:.0f} s are over"})
            else:
                try:
                    row = measure()
                except Exception as error:
                    traceback.print_exc()
                    row = {"error": f"{type(error).__name__}: {error}", "passed": False}
                rows.append({"check": what, **row})
            rows[-1]["at_seconds"] = round(time.perf_counter() - started, 1)
            print(json.dumps(rows[-1]), flush=True)
            if options.output and rank == 0:
                options.output.write_text(as_json(results), encoding="utf-8")
    bad = [row["check"] for row in rows if not row.get("passed", "skipped" in row)]
    print("failed: " + ", ".join(bad) if bad else "all passed")
    return len(bad) > 0


def checks(models: list[str], smoke: bool, ranks: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the name and the function of each check."""
    device = "cpu" if smoke else "cuda"
    benches: dict[str, Bench] = {}  # the latest one, by kind of transformer
    if ranks == 1:
        for name, situation in list(situations.SITUATIONS.items())[: 2 if smoke else None]:
            yield f"change of {name}", partial(followed, partial(situations.differences, situation), device)
        if not smoke:
            yield "two threads", partial(followed, situations.threads, device)
            yield "two streams", partial(followed, situations.streams, device)
    for family in () if ranks > 1 else FAMILIES[:2] if smoke else FAMILIES:
        yield f"tiny {family}", partial(tiny_run, family, device)
    for name in models:
        yield f"{name}: build", partial(_build, benches, name, device, smoke, ranks)
        for what, density in DENSITIES.items():
            yield f"{name}, {what}", partial(step, benches, density, TIMED[name])


def _build(benches: dict[str, Bench], name: str, device: str, smoke: bool, ranks: int) -> dict[str, Any]:
    """Build a model, reusing the previous transformer if it is the same."""
    kind, model = name.partition("-")[0], (TINY if smoke else MODELS)[name]
    transformer = benches[kind].transformer if kind in benches else None
    benches.clear()
    if device == "cuda":
        torch.cuda.empty_cache()
    benches[kind] = Bench(model, device, transformer=transformer)
    if ranks > 1 and transformer is None:
        share_tokens(benches[kind].transformer, ranks, smoke)
    return {"passed": True}


def _computing(bench: Bench, density: float) -> Preset:
    """Return a preset that computes every step, with this share of each row's tiles."""
    if density == 1:
        return load_preset("exact")
    schedule = {"control": "interval", "interval": 1, "warmup": 0, "cooldown": 0}
    drawn_anew = {"skip.refresh": 1, "skip.residual": False}
    return load_preset(bench.model.sparse, schedule=schedule, **{"skip.top_k": density}, **drawn_anew)


def step(benches: dict[str, Bench], density: float, timed: int) -> dict[str, Any]:
    """Time the same steps without graphs, with graphs, and with graphs where they are faster."""
    (bench,) = benches.values()
    preset = _computing(bench, density)
    runs = {wanted: _measured(bench, load_preset(preset, graphs=wanted), timed) for wanted in WANTED}
    (plain, *others), tiles = ([run.pop(what) for run in runs.values()] for what in ("outputs", "densities"))
    differences = [(a - b).abs().max().item() for item in others for a, b in zip(plain, item, strict=True)]
    same_tiles = all(item == tiles[0] for item in tiles)
    captured = bench.device.type == "cpu" or runs["always"]["graphs"] > 0
    return {
        "largest_difference": max(differences),
        "same_tiles": same_tiles,
        "tile_density": statistics.mean(tiles[0]) if tiles[0] else 1.0,
        "saved": 1 - runs["always"]["ms"] / runs["never"]["ms"],
        **runs,
        "passed": max(differences) == 0 and same_tiles and captured,
    }


def _measured(bench: Bench, preset: Preset, timed: int) -> dict[str, Any]:
    accelerate_pipeline(bench, preset)
    is_gpu = bench.device.type == "cuda"
    try:
        run, outputs, times = bench.loop(BEFORE + timed + 1), [], []
        with peak_memory(bench.device) as memory:
            for _ in range(BEFORE + timed):
                elapsed = stopwatch(bench.device)
                outputs.append(next(run).clone())
                times.append(elapsed())
        row = {"ms": statistics.median(times[BEFORE:]), "ms_before": times[:BEFORE], "outputs": outputs, **memory}
        if is_gpu:
            row["gpu_idle"] = _idle(run)
        report, (driver,) = bench.dit_accel.report(), bench.dit_accel._drivers
        row["densities"] = [item.density for item in report.attentions if item.step < BEFORE + timed]
        row["graphs"] = 0 if driver.graphs is None else len(driver.graphs)
        row |= {"not_captured": report.not_captured, "notes": report.notes, "fallbacks": report.fallbacks[:3]}
    finally:
        restore_pipeline(bench)
    if is_gpu:
        torch.cuda.empty_cache()
        row["left_reserved_gib"] = torch.cuda.memory_reserved() / 2**30
    return row


def _idle(run: Iterator[torch.Tensor]) -> float:
    """Share of the next step in which no kernel runs, under the profiler."""
    busy, span = busy_and_span((event.time_range.start, event.time_range.end) for event in profiled(run, 1))
    return 1 - busy / span


def followed(differences: Callable[[str, torch.dtype], list[str]], device: str) -> dict[str, Any]:
    """Check that replayed steps follow a change; a CPU captures nothing, so missing graphs are no failure there."""
    wrong = differences(device, torch.bfloat16 if device == "cuda" else torch.float32)
    if device == "cpu":
        wrong = [item for item in wrong if "computes on cpu" not in item]
    return {"wrong": wrong, "passed": not wrong}


def tiny_run(family: str, device: str) -> dict[str, Any]:
    """Run a whole tiny pipeline twice without and with graphs, in the closed loop; then with other weights."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    preset = load_preset("balanced", **{"schedule.target_error": 0.2})
    outputs: dict[str, list] = {}
    for graphs in ("never", "always"):
        pipe = accelerate_pipeline(tiny_pipeline(family).to(device, dtype), preset, **{"kernels.graphs": graphs})
        outputs[graphs] = [torch.as_tensor(tiny_output(pipe, family, steps=12)) for _ in range(2)]
        next(pipe.transformer.parameters()).data.mul_(1.5)  # in place: the graphs stay valid
        outputs[graphs].append(torch.as_tensor(tiny_output(pipe, family, steps=12)))
        pipe.transformer.to(torch.float32).to(dtype)  # new memory: steps are captured again
        outputs[graphs] += [torch.as_tensor(tiny_output(pipe, family, steps=12)) for _ in range(2)]
    differences = [(a.float() - b.float()).abs().max().item() for a, b in zip(*outputs.values(), strict=True)]
    report, driver = pipe.dit_accel.report(), pipe.dit_accel._drivers[0]
    return {
        "largest_difference": max(differences),
        "modes": report.steps_by_mode,
        "graphs": len(driver.graphs),
        "notes": report.notes,
        "passed": max(differences) == 0,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TIMED, default=list(TIMED))
    parser.add_argument("--seconds", type=float, default=210.0, help="no row starts later; default %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file, written after every row")
    parser.add_argument("--one-core", action="store_true", help="share one core with a busy process (Linux)")
    parser.add_argument("--smoke", action="store_true", help="toy size, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
