#!/usr/bin/env python3
"""Run the lines that `dit-accel recommend` prints for cards of 24, 16 and 12 GiB, on pipelines with random weights.

    python -m scripts.bench.recommended --models flux,z-image-turbo --output docs/results/recommended.json
    python -m scripts.bench.recommended --tiny                        # the same calls on the CPU, where nothing moves

The process may allocate no more than such a card leaves. A row has the peak by count and the measured one. Calls have
at most fourteen steps, after two on the whole GPU that load kernels; the seconds of all are calculated from them. A row
has those of the second call, with another prompt, because the first also rounds weights; of the first if it took long.
Then the other presets that `recommend` names run for two steps; what is reserved is that of all.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.errors import headline
from dit_accel.tools.advise.recommend import recommend
from dit_accel.tools.measure.origin import describe_run
from dit_accel.tools.measure.timing import timed_output
from scripts.bench.call_speed.pipelines import CASES, Case, arguments, build
from scripts.bench.card_memory.ways import stop_group_offload
from scripts.bench.model_speed.bench import OF_REPORT
from scripts.bench.model_speed.measures import limit_memory, peak_memory
from scripts.bench.small_cards import CONTEXT, SHOWN
from scripts.tables import names_in, write_rows

Row = dict[str, Any]
GPUS = {"24": "rtx4090", "16": "rtx4080", "12": "rtx4070"}
COMPUTED = {28: 10, 30: 10, 50: 14}  # steps of these that `EVERY_FIFTH` computes
TIMED = {"control": "interval", "warmup": 2, "interval": 3, "cooldown": 0}
LONG = 30  # seconds of a call that is not repeated
MOST = 14  # steps of a call; graphs are replayed from the fifth on that is computed


def main() -> int:
    options = _options()
    device, deadline = torch.device("cpu" if options.tiny else "cuda:0"), time.monotonic() + options.seconds
    rows = (row for name in options.models for row in run_model(name, options, device, deadline))
    return int(any("error" in row for row in write_rows(options.output, describe_run(device), rows, SHOWN)["rows"]))


def run_model(name: str, options: argparse.Namespace, device: torch.device, deadline: float) -> Iterator[Row]:
    """Yield a row for each card, the smallest first; a larger one with the same lines has the same row."""
    case, row = CASES[name], {}
    limit_memory(device, None)
    pipe = build(case, tiny=options.tiny)
    pipe.vae.to(pipe.transformer.dtype)  # as the lines load it
    cards = [placement(case, card) for card in options.cards]
    for preset in dict.fromkeys(facts["preset"] for facts in cards):
        call_of(accelerate_pipeline(pipe, preset, schedule=TIMED), case, 2, tiny=options.tiny)
    for facts in sorted(cards, key=lambda item: item["card_gib"]):
        if "error" in row or row.get("lines") != facts["lines"]:
            may_begin = facts["lines"] and time.monotonic() < deadline
            row = measured(pipe, case, facts, options, device, deadline) if may_begin else {}
        yield {"case": name, **row, **facts}


def measured(
    pipe: Any, case: Case, facts: Row, options: argparse.Namespace, device: torch.device, deadline: float
) -> Row:
    """Run a pipeline as the lines place it: the row of a call, and the presets that ran; or an error."""
    row: Row = {}
    try:
        limit_memory(device, None)
        restore_pipeline(pipe)
        if device.type == "cuda":
            pipe.remove_all_hooks()
        for part in filter(lambda part: isinstance(part, torch.nn.Module), pipe.components.values()):
            stop_group_offload(part)
        ours = SimpleNamespace(accelerate_pipeline=partial(accelerate_pipeline, schedule=facts["schedule"]))
        names = {"pipe": pipe, "torch": torch, "dit_accel": ours}
        for line in facts["lines"]:
            if device.type == "cuda" or line.startswith("dit_accel"):
                exec(line, names)
        limit_memory(device, facts["card_gib"] - CONTEXT)
        first = row = call_of(pipe, case, MOST, tiny=options.tiny)
        if first["measured_seconds"] < LONG:
            row = call_of(pipe, case, MOST, tiny=options.tiny, prompt="a hare")
        row |= facts | {key: max(first[key] or 0, row[key] or 0) for key in ("peak_gib", "reserved_gib")}
        row |= {"first_seconds": first["seconds"], "ran": [facts["preset"]]}
        accelerate = next(line for line in facts["lines"] if line.startswith("dit_accel"))
        for preset in facts["others"] if time.monotonic() < deadline else ():
            exec(accelerate.replace(facts["preset"], preset), names)
            reserved = call_of(pipe, case, 2, tiny=options.tiny)["reserved_gib"]
            row |= {"ran": [*row["ran"], preset], "reserved_gib": max(reserved or 0, row["reserved_gib"])}
    except Exception as problem:  # most of all torch.OutOfMemoryError, which this is to find
        row["error"] = headline(problem)
    return row


def placement(case: Case, card: str) -> Row:
    """Return the recommended preset and lines for a card, no lines if the pipeline does not fit, and the peak."""
    found = recommend(case.model, gpu=GPUS[card], **dict(zip(("height", "width", "frames"), case.size, strict=True)))
    lines = [line for line in found.python.splitlines() if line.startswith(("pipe.", "dit_accel."))]
    first, *others = (preset for preset, _ in found.choices)
    others = [preset for preset in others if "8bit" in preset or "8bit" not in first]  # bf16 has lines of its own
    facts = {"card_gib": int(card), "preset": first, "others": others, "lines": lines, "counted_gib": found.gib}
    return facts | {"schedule": TIMED if case.calls[0].schedule else {}}


def call_of(pipe: Any, case: Case, most: int, *, tiny: bool, prompt: str = "a fox") -> Row:
    """Call an accelerated pipeline for ``most`` steps: seconds, their parts, and peaks of memory."""
    call = case.calls[0]
    steps = min(call.steps, most)
    with peak_memory(pipe._execution_device) as memory:
        values = arguments(case, call, tiny=tiny) | {"num_inference_steps": steps, "prompt": prompt}
        output = timed_output(pipe, values, seed=0)
    report = pipe.dit_accel.report()
    computed = [step.seconds for step in report.steps if step.mode != "dispatch"]
    forecast = [step.seconds for step in report.steps if step.mode == "dispatch"]
    more = COMPUTED.get(call.steps, len(computed)) - len(computed)
    each = {"computed_seconds": min(computed[-2:]), "forecast_seconds": statistics.median(forecast or [0.0])}
    left = more * each["computed_seconds"] + (call.steps - steps - more) * each["forecast_seconds"]
    return {
        "steps": call.steps,
        "seconds": output.seconds + left,
        **each,
        "measured_steps": [step.mode for step in report.steps],
        "measured_seconds": output.seconds,
        "stages": output.stages,
        **memory,
        "decoded": report.decoding,
        **{key: getattr(report, key) for key in OF_REPORT if key != "memory_measures"},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_in(CASES), default=list(CASES), help=f"among {', '.join(CASES)}")
    parser.add_argument("--cards", type=names_in(GPUS), default=list(GPUS), help="GiB")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no new call after this time")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
