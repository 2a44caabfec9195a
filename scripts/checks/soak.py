#!/usr/bin/env python3
"""Run many generations in one process, with failures among them, and check that nothing is left behind.

Tiny pipelines stay in memory for the whole run. Each generation randomly chooses a pipeline, a fitting preset (or keeps
or removes the current one), a size, a number of steps, a LoRA on or off, and in half of the cases a failure: an
exception or an interrupt inside a block, an exception in the callback, or a stop by the callback. From time to time
every pipeline is restored and must repeat its first plain result bit for bit; the number of live tensors and the memory
of the process are recorded. Caches that are functions of their key, such as token orders by size, are emptied first.

    python -m scripts.checks.soak --output docs/results/soak.json --minutes 10
    python -m scripts.checks.soak --output soak.json --generations 1000 --seed 7 --pipelines flux wan

Exits with 1 if a plain result drifts or tensors are left over.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import psutil
import torch

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.presets import preset_names
from dit_accel.tools.measure.origin import describe_run
from scripts.tables import as_json
from tests.tiny import tiny_flux_lora, tiny_inputs, tiny_output, tiny_pipeline

PIPELINES = ("flux", "flux-controlnet", "flux-img2img", "sd3", "qwen-image", "ltx", "wan", "wan22", "hunyuan")
BLOCKS = ("transformer_blocks", "single_transformer_blocks", "blocks")
BLOCK_FAILS, INTERRUPT = "exception in a block", "interrupt in a block"
CALLBACK_FAILS, STOP = "exception in the callback", "stop by the callback"
ACCIDENTS = (BLOCK_FAILS, INTERRUPT, CALLBACK_FAILS, STOP)
SCALES, UNIT = (0.75, 1.0, 1.5), 32  # factors of a pipeline's default sides, rounded to multiples (pixels)


class Accident(RuntimeError):
    """Exception raised on purpose."""


@dataclass
class Subject:
    """One pipeline of the run.

    Args:
        name: name of the tiny pipeline.
        plain: its first plain result.
        presets: names of the presets that fit it.
        has_lora: whether a LoRA is loaded.
    """

    name: str
    pipe: Any
    plain: torch.Tensor
    presets: list[str]
    has_lora: bool = False

    @classmethod
    def of(cls, name: str) -> Subject:
        pipe, presets = tiny_pipeline(name), []
        for preset in preset_names():
            try:
                accelerate_pipeline(pipe, preset)
            except UnsupportedError:
                continue
            presets.append(preset)
        return cls(name, restore_pipeline(pipe), tiny_output(pipe, name), presets)

    def switch_lora(self) -> None:
        if self.has_lora:
            self.pipe.unload_lora_weights()
        else:
            self.pipe.load_lora_weights(tiny_flux_lora(self.pipe))
        self.has_lora = not self.has_lora

    def drift(self) -> float:
        """Restore the pipeline; return the largest difference of its plain result from the first one."""
        restore_pipeline(self.pipe)
        if self.has_lora:
            self.switch_lora()
        return float((tiny_output(self.pipe, self.name) - self.plain).abs().max())


@dataclass
class Soak:
    """A run of generations.

    Args:
        subjects: the pipelines.
        random: generator of all random choices.
        counts: number of events by name.
        checks: findings of each check, with all pipelines restored.
    """

    subjects: list[Subject]
    random: random.Random
    counts: Counter = field(default_factory=Counter)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def generate(self) -> None:
        """Run one generation; a failure is counted, not raised."""
        draw, subject = self.random, self.random.choice(self.subjects)
        self.counts["generations"] += 1
        if draw.random() < 0.5:
            accelerate_pipeline(subject.pipe, draw.choice(subject.presets), **draw.choice([{}, {"warmup": 1}]))
            self.counts["accelerated"] += 1
        elif draw.random() < 0.3:
            restore_pipeline(subject.pipe)
            self.counts["restored"] += 1
        if subject.name == "flux" and draw.random() < 0.3:
            subject.switch_lora()
            self.counts["LoRA loaded or unloaded"] += 1
        steps = draw.randint(2, 9)
        accident = draw.choice(ACCIDENTS) if draw.random() < 0.5 else None
        try:
            with _arranged(subject.pipe, accident, draw.randrange(steps), draw) as callback:
                tiny_output(subject.pipe, subject.name, steps=steps, **_size(subject.name, draw), **callback)
        except (Accident, KeyboardInterrupt):
            self.counts[f"ended by an {accident}"] += 1

    def check(self) -> None:
        """Restore every pipeline and record the findings."""
        drifts = {subject.name: subject.drift() for subject in self.subjects}
        for item in gc.get_objects():
            if isinstance(item, functools._lru_cache_wrapper) and str(item.__module__).startswith("dit_accel."):
                item.cache_clear()
        gc.collect()
        self.checks.append(
            {
                "generations": self.counts["generations"],
                "drift": max(drifts.values()),
                "drifted": [name for name, drift in drifts.items() if drift],
                "tensors": sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()),
                "rss_mib": round(psutil.Process().memory_info().rss / 2**20, 1),
            }
        )

    def left_over(self) -> list[str]:
        """Describe what is left over; tensors count if their number never returns to that of the first half."""
        drifted = sorted({name for check in self.checks for name in check["drifted"]})
        reasons = [f"plain results drifted: {', '.join(drifted)}"] if drifted else []
        tensors = [check["tensors"] for check in self.checks]
        before, after = max(tensors[: len(tensors) // 2], default=tensors[0]), min(tensors[len(tensors) // 2 :])
        return reasons + ([f"live tensors grew from {before} to {after}"] if after > before else [])


@contextmanager
def _arranged(pipe: Any, accident: str | None, when: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Arrange a failure within the ``with`` block; yield the arguments that the call needs for it.

    Args:
        when: step of a callback, or call of a block, from 0.
    """
    calls = itertools.count()

    def fail(*_: Any) -> None:
        if next(calls) == when:
            raise KeyboardInterrupt if accident == INTERRUPT else Accident

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict) -> dict:
        if step == when and accident == CALLBACK_FAILS:
            raise Accident
        pipe._interrupt = step >= when
        return tensors

    if accident in (CALLBACK_FAILS, STOP):
        yield {"callback_on_step_end": callback}
        return
    blocks = [block for name in BLOCKS for block in getattr(pipe.transformer, name, ())]
    handle = None if accident is None else draw.choice(blocks).register_forward_pre_hook(fail)
    try:
        yield {}
    finally:
        if handle is not None:
            handle.remove()


def _size(name: str, draw: random.Random) -> dict[str, int]:
    """Height and width of a call in pixels."""
    inputs, scale = tiny_inputs(name), draw.choice(SCALES)
    return {side: max(UNIT, UNIT * round(scale * inputs[side] / UNIT)) for side in ("height", "width")}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--generations", type=int, default=1_000_000, help="number of generations")
    parser.add_argument("--minutes", type=float, default=10.0, help="likewise")
    parser.add_argument("--every", type=int, default=50, help="generations from one check to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, default=list(PIPELINES))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    diffusers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    ends = time.monotonic() + 60 * options.minutes
    soak = Soak([Subject.of(name) for name in options.pipelines], random.Random(options.seed))
    while soak.counts["generations"] < options.generations and time.monotonic() < ends:
        soak.generate()
        if soak.counts["generations"] % options.every == 0:
            soak.check()
            print(soak.checks[-1], flush=True)
    soak.check()
    facts = {"run": describe_run("cpu"), "seed": options.seed, "pipelines": options.pipelines}
    found = {"left_over": soak.left_over(), "counts": dict(soak.counts), "checks": soak.checks}
    options.output.write_text(as_json({**facts, **found}))
    if soak.left_over():
        raise SystemExit("; ".join(soak.left_over()))


if __name__ == "__main__":
    main()
