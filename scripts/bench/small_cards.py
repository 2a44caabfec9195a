#!/usr/bin/env python3
"""Time transformers of full size in the memory of a small card, with random weights, plain and by `balanced`.

    python -m scripts.bench.small_cards --models flux --output docs/results/small-cards.json
    python -m scripts.bench.small_cards --tiny                        # the same paths on the CPU, in seconds

The process may allocate no more than a card of 24, 16 or 12 GiB leaves. The GPU's speed and its bus stay as they are:
on a slower card both a computed step and the transfer of weights take longer. Text encoders and autoencoder are left
out, because they are not on the GPU while steps run. Weights are in bf16, stored in float8 by diffusers (`cast`), in
int8 or float8 by torchao, or in 4 bits: as of a .gguf file (`q4`) or by bitsandbytes (`nf4`). With the way `linear` the
layers of `balanced` run in float8, while weights that would fill the card wait on the host.

A few computed and forecast steps are timed, at fixed places, because errors of forecasts mean nothing with random
weights. The seconds of the whole denoising are calculated from their medians, for as many computed steps as in
`scripts.bench.calls`. A profiler counts the copies to the GPU in a forecast step. A run whose memory would also fit a
smaller card is not repeated for that one. The JSON is written after each row, and keeps rows of earlier commands.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.errors import headline
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.card_memory.table import markdown
from scripts.bench.card_memory.ways import WAYS
from scripts.bench.card_memory.weights import WEIGHTS, bytes_of, why_not_available
from scripts.bench.model_speed.bench import Bench
from scripts.bench.model_speed.measures import limit_memory, peak_memory, profiled, stopwatch
from scripts.bench.model_speed.models import MODELS, TINY, Model, variant
from scripts.tables import names_in, write_rows

Row = dict[str, Any]
CARDS = (24, 16, 12)  # GiB
CONTEXT = 0.75  # GiB of a card that driver, CUDA context and loaded kernels take
TIMED = {"control": "interval", "warmup": 1, "interval": 3, "cooldown": 0}  # computes steps 0, 1, 4, 7, …
NO_TIME = "no time was left"
STEPS = {"flux": (28, 10), "wan-14b": (50, 14), "qwen-image": (50, 14), "hunyuan": (50, 14), "ltx2": (30, 10)}
SHOWN = ("case", "weights", "way", "run", "card_gib", "fits", "computed_seconds", "forecast_seconds", "seconds")
SHOWN += ("peak_gib", "counted_gib", "lines", "copies", "replayed", "not_captured", "setup_seconds", "error")


class Case(NamedTuple):
    """Model with the steps of its pipeline, and how many of them `EVERY_FIFTH` of `scripts.bench.calls` computes."""

    model: Model
    steps: int
    computed: int


def case_of(name: str, frames: int, *, tiny: bool) -> Case:
    """Return a model as its pipeline runs it: images of 1024 x 1024, videos of 480p, guidance where it is usual."""
    model = (TINY if tiny else MODELS)[name]
    if name in ("wan-14b", "hunyuan") and not tiny:
        model = replace(model, latents=(1, 16, (frames - 1) // 4 + 1, 60, 104))
    if name == "qwen-image":
        model = variant(model, "CFG")
    return Case(model, *STEPS[name])


def main() -> int:
    options = _options()
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    deadline = time.monotonic() + options.seconds
    forms = product(options.models, options.weights)
    rows = chain.from_iterable(measure_weights(*form, options, device, deadline) for form in forms)
    print(markdown({"runs": [write_rows(options.output, describe_run(device), rows, SHOWN)]}))
    return 0


def measure_weights(
    name: str, weights: str, options: argparse.Namespace, device: torch.device, deadline: float
) -> Iterator[Row]:
    """Yield the rows of a model with weights of one form: each way, plain and accelerated, on each card."""
    case = case_of(name, options.frames, tiny=options.tiny)
    facts: Row = {"case": name, "latents": case.model.latents, "weights": weights, "steps": case.steps}
    if (reason := why_not_available(weights)) is not None:
        yield {**facts, "error": reason}
        return
    if time.monotonic() > deadline:
        yield {**facts, "error": NO_TIME}
        return
    limit_memory(device, None)
    if device.type == "cuda":  # the pinned memory of an earlier model, which blocks of other sizes can't use
        getattr(torch._C, "_host_emptyCache", int)()
    bench = Bench(case.model, device.type)
    WEIGHTS[weights][1](bench.transformer)
    facts |= {"weights_gib": bytes_of(bench.transformer) / 2**30}
    for way in options.ways:
        if time.monotonic() > deadline:
            yield {**facts, "way": way, "error": NO_TIME}
            continue
        for row in measure_way(bench, case, facts, way, options.steps, deadline):
            yield {**facts, "way": way, **row}


def measure_way(bench: Bench, case: Case, facts: Row, way: str, steps: int, deadline: float) -> Iterator[Row]:
    """Yield a row for each card, first accelerated, then plain; group offload is enabled once for all of them."""
    device = torch.device("cuda", 0) if bench.device.type == "cuda" else bench.device
    started = time.perf_counter()
    layers = {"linear": {"dtype": "float8"}} if way == "linear" else {}
    if layers:
        bench.transformer.to("cpu")  # as it is loaded: the memory decides where weights wait
        limit_memory(device, CARDS[0] - CONTEXT)
    accelerate_pipeline(bench, "balanced", schedule=TIMED, **layers)
    try:
        with WAYS[way](bench.transformer, device):
            setup = {"setup_seconds": time.perf_counter() - started}
            for run in ("balanced",) if layers else ("balanced", "plain"):
                if run == "plain":
                    restore_pipeline(bench)
                for row in measure_cards(bench, case, way, steps, device, deadline):
                    yield {"run": run, **row, **setup}
    except Exception as problem:  # of another package: the next way may still run
        yield {"error": headline(problem)}
    finally:
        limit_memory(device, None)
        restore_pipeline(bench)


def measure_cards(
    bench: Bench, case: Case, way: str, steps: int, device: torch.device, deadline: float
) -> Iterator[Row]:
    """Yield the row of each card, largest first; after the deadline one that says so."""
    row: Row = {}
    whole = bytes_of(bench.transformer) / 2**30 if way == "model" else 0.0
    for card in CARDS:
        limit = card - CONTEXT
        is_same = row.get("fits") and (row["reserved_gib"] is None or row["reserved_gib"] <= limit)
        if whole > limit:
            row = {"fits": False}  # without moving its weights to the GPU and back, which takes seconds
        elif row.get("fits") is not False and not is_same:
            if time.monotonic() > deadline:
                yield {"error": NO_TIME}
                return
            if way == "model":
                bench.transformer.to("cpu")
            row = _in_memory(bench, case, way, steps, device, limit) | {"measured_as_gib": card}
        yield {"card_gib": card, **row}


def _in_memory(bench: Bench, case: Case, way: str, steps: int, device: torch.device, limit: float) -> Row:
    limit_memory(device, limit)
    try:
        return {"fits": True, **timed(bench, case, way, steps, device)}
    except torch.OutOfMemoryError:
        return {"fits": False}


def timed(bench: Bench, case: Case, way: str, steps: int, device: torch.device) -> Row:
    """Time the first steps of a run, and return the seconds of each kind of step and of the whole denoising."""
    is_plain = not hasattr(bench, "dit_accel")
    elapsed = stopwatch(device)
    if way == "model":
        bench.transformer.to(device)
    begin = elapsed() / 1000
    steps = 1 + (steps - 1) // TIMED["interval"] if is_plain else steps  # as many computed steps
    run = bench.loop(steps + (0 if is_plain else 1))  # one more step, which is profiled
    with peak_memory(device) as memory:
        seconds = [milliseconds / 1000 for milliseconds in bench.timed(run, steps)]
    facts: Row = {}
    if is_plain:
        computed, forecast, count = statistics.median_low(seconds[1:]), None, case.steps
    else:
        facts["copies"] = _copies(run, device)
        modes = [step.mode for step in bench.dit_accel.report().steps]
        facts["copies"]["mode"] = modes[steps]
        pairs = [*zip(modes, seconds, strict=False)]
        of_kind = ([item for mode, item in pairs if mode == kind] for kind in ("update", "dispatch"))
        computed, forecast = map(statistics.median_low, of_kind)  # kernels are compiled in the first step of a kind
        count = case.computed
        report = bench.dit_accel.report()
        facts["fallbacks"] = sorted({item["reason"] for item in report.fallbacks})
        facts |= {"replayed": report.replayed, "not_captured": report.not_captured}
    whole = begin + count * computed + (case.steps - count) * (forecast or 0.0)
    return {
        "start_seconds": begin,
        "computed_seconds": computed,
        "forecast_seconds": forecast,
        "computed_steps": count,
        "seconds": whole,
        "seconds_each": seconds,
        **memory,
        **facts,
    }


def _copies(run: Iterator[torch.Tensor], device: torch.device) -> Row:
    """Profile the next step of a run: the number of copies from the host to the GPU, and their milliseconds."""
    if device.type != "cuda":
        next(run)
        return {"count": None, "ms": None}
    times = [event.time_range.end - event.time_range.start for event in profiled(run, 1) if "HtoD" in event.name]
    return {"count": len(times), "ms": sum(times) / 1000}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_in(STEPS), default=list(STEPS), help=f"among {', '.join(STEPS)}")
    parser.add_argument("--weights", type=names_in(WEIGHTS), default=list(WEIGHTS), help=f"among {', '.join(WEIGHTS)}")
    parser.add_argument("--ways", type=names_in(WAYS), default=list(WAYS), help=f"among {', '.join(WAYS)}")
    parser.add_argument("--frames", type=int, default=81, help="of videos; default %(default)s")
    parser.add_argument("--steps", type=int, default=14, help="accelerated steps that are timed; default %(default)s")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no new measurement after this time")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
