#!/usr/bin/env python3
"""Times the video transformers at full size, random weights, beside plain diffusers, on one GPU.

    python scripts/bench_video.py --model hunyuan --output docs/results/video-hunyuan.json
    python scripts/bench_video.py --model wan-14b --runs memory --output docs/results/video-wan-14b.json
    python scripts/bench_video.py --tiny                              # the same paths on the CPU, in seconds

Random weights tell speed and memory and nothing about pictures. Their attention maps are noise, so what a policy would
leave out is drawn at random at a stated density, after the policy has done (and taken the time of) its own choice; and
their outputs defy forecasts, so computed steps are forced by a fixed interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dit_accel import Preset, accelerate_transformer, load_preset
from dit_accel.bench.origin import describe_run
from dit_accel.kernels import pack_bits
from dit_accel.layout import TokenLayout
from dit_accel.policies import flashomni, sparge

STEPS = 50
PLAIN_STEPS = 3  # timed by default; a plain step varies by less than 1%
# FlashOmni's table 1 counts 39% of all attention left out by (40%, 1%, 6, 1, 0): that is 57% of each of the 34 DISPATCH
# steps of 50, nearly all of it whole rows.
FLASHOMNI_ROWS, FLASHOMNI_TILES = 0.45, 0.96
FLASHOMNI = {"hunyuan": "hunyuan-flashomni-balanced", "wan21": "wan21-flashomni"}


@dataclass(frozen=True)
class Model:
    """One transformer at the size of a published clip.

    Args:
        build: makes it on the default device in the default dtype.
        call: everything but latents and timestep that a pipeline passes.
        latents: shape ``[B, C, frames, height, width]``.
        family: prefix of its presets.
        branches: calls a step.
    """

    build: Callable[[], torch.nn.Module]
    call: Callable[[torch.device, torch.dtype], dict[str, Any]]
    latents: tuple[int, ...]
    family: str
    branches: tuple[str, ...] = ("cond",)


def _hunyuan(**changes: Any) -> torch.nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(**{"guidance_embeds": True, **changes})


def _wan(**changes: Any) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**changes)


def _hunyuan_call(width: int, pooled: int) -> Callable[[torch.device, torch.dtype], dict[str, Any]]:
    """A prompt of 60 tokens, padded to the 256 that the pipeline passes."""

    def call(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "encoder_hidden_states": torch.randn(1, 256, width, device=device, dtype=dtype),
            "encoder_attention_mask": torch.arange(256, device=device)[None] < 60,
            "pooled_projections": torch.randn(1, pooled, device=device, dtype=dtype),
            "guidance": torch.full([1], 6000.0, device=device, dtype=dtype),
        }

    return call


def _wan_call(width: int) -> Callable[[torch.device, torch.dtype], dict[str, Any]]:
    return lambda device, dtype: {"encoder_hidden_states": torch.randn(1, 512, width, device=device, dtype=dtype)}


MODELS = {
    "hunyuan": Model(_hunyuan, _hunyuan_call(4096, 768), (1, 16, 21, 60, 104), "hunyuan"),
    "wan-1.3b": Model(
        lambda: _wan(num_attention_heads=12, ffn_dim=8960, num_layers=30),
        _wan_call(4096),
        (1, 16, 21, 60, 104),
        "wan21",
    ),
    "wan-14b": Model(_wan, _wan_call(4096), (1, 16, 21, 90, 160), "wan21", branches=("cond", "uncond")),
}
TINY = {
    "hunyuan": Model(
        lambda: _hunyuan(
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=32,
            pooled_projection_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
        _hunyuan_call(32, 16),
        (1, 16, 3, 16, 18),
        "hunyuan",
    ),
    "wan-1.3b": Model(
        lambda: _wan(num_attention_heads=2, attention_head_dim=16, ffn_dim=32, num_layers=2, text_dim=32, freq_dim=16),
        _wan_call(32),
        (1, 16, 3, 16, 18),
        "wan21",
    ),
}
TINY["wan-14b"] = replace(TINY["wan-1.3b"], branches=MODELS["wan-14b"].branches)


class Bench:
    """One model on one device, and the loop that every run of it takes."""

    def __init__(self, model: Model, device: str) -> None:
        self.model = model
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                self.transformer = model.build().eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(default)
        self.call = model.call(self.device, self.dtype)

    def timesteps(self, steps: int) -> torch.Tensor:
        return torch.linspace(1000, 1000 / steps, steps, device=self.device)

    @torch.no_grad()
    def denoise(self, steps: int, until: int | None = None) -> list[float]:
        """Milliseconds of each of the first ``until`` steps of a run of ``steps``, all branches together."""
        latents = torch.randn(self.model.latents, device=self.device)
        milliseconds = []
        for timestep in self.timesteps(steps)[:until]:
            elapsed = _stopwatch(self.device)
            for branch in self.model.branches:
                with self.transformer.cache_context(branch):
                    velocity = self.transformer(
                        hidden_states=latents.to(self.dtype),
                        timestep=timestep.expand(1),
                        return_dict=False,
                        **self.call,
                    )[0]
            latents = latents - velocity.float() / steps
            milliseconds.append(elapsed())
        if not latents.isfinite().all():
            raise RuntimeError("the run gave values that are no numbers")
        return milliseconds

    def plain(self, timed_steps: int) -> dict[str, Any]:
        """Diffusers as it is."""
        with _peak_memory(self.device) as memory:
            times = self.denoise(STEPS, until=1 + timed_steps)[1:]
        return {"run": "plain", "ms": statistics.median(times), **memory}

    def accelerated(
        self, run: str, preset: Preset, steps: int, *, rows: float = 1.0, tiles: float = 1.0, warm: bool = True
    ) -> dict[str, Any]:
        """One whole run under a preset with the given densities; ``warm`` compiles kernels in a run before."""
        with _forced_density(rows, tiles):
            acceleration = accelerate_transformer(self.transformer, preset, self.timesteps(steps))
            try:
                if warm:
                    self.denoise(steps)
                with _peak_memory(self.device) as memory:
                    times = self.denoise(steps)
                report = acceleration.report()
            finally:
                acceleration.restore()
        by_mode: dict[str, list[float]] = {}
        for step, milliseconds in zip(report.steps, times, strict=True):
            by_mode.setdefault(step.mode, []).append(milliseconds)
        return {
            "run": run,
            "preset": preset.effective(),
            "row_density": rows,
            "tile_density": tiles,
            "steps": steps,
            "seconds": sum(times) / 1000,
            "ms_by_mode": {mode: statistics.median(part) for mode, part in by_mode.items()},
            "steps_by_mode": report.steps_by_mode,
            "computed_fraction": report.computed_fraction,
            "cache_gib": report.cache_bytes / 2**30,
            **{key: getattr(report, key) for key in ("estimated_bytes", "memory_measures", "notes", "fallbacks")},
            **memory,
        }


def computed_steps(bench: Bench, family: str) -> Iterator[dict[str, Any]]:
    """A step that computes everything, and computed steps that leave out half and four fifths of the tiles."""
    yield bench.accelerated("exact", load_preset("exact"), 4)
    for density in (0.5, 0.2):
        schedule = {"control": "fixed", "warmup": 1, "interval": 2, "final_full": 0}
        preset = load_preset(f"{family}-balanced", schedule=schedule)
        yield bench.accelerated(f"{1 - density:.0%} of tiles left out", preset, 5, tiles=density)


def fifty_steps(bench: Bench, family: str) -> Iterator[dict[str, Any]]:
    """50 steps of which 14 are computed, 4 of them dense."""
    schedule = {"control": "fixed", "warmup": 4, "interval": 5, "final_full": 1}
    preset = load_preset(f"{family}-balanced", schedule=schedule)
    yield bench.accelerated("14 of 50 steps computed, 50% of tiles", preset, STEPS, tiles=0.5, warm=False)


def flashomni_steps(bench: Bench, family: str) -> Iterator[dict[str, Any]]:
    """FlashOmni's own setting; ten steps meet every mode, and 50 are put together from those."""
    preset = load_preset(FLASHOMNI[family], **{"schedule.warmup": 2, "reuse.ramp": 0.01})
    yield bench.accelerated("FlashOmni", preset, 10, rows=FLASHOMNI_ROWS, tiles=FLASHOMNI_TILES)


def memory_budget(bench: Bench, family: str) -> Iterator[dict[str, Any]]:
    """FlashOmni's setting within a memory budget: its peak beside the estimate."""
    preset = load_preset(
        FLASHOMNI[family],
        schedule={"warmup": 1, "interval": 2, "final_full": 0},
        memory={"budget_gib": 90.0},
        **{"reuse.ramp": 0.01},
    )
    yield bench.accelerated("FlashOmni in 90 GiB", preset, 4, rows=FLASHOMNI_ROWS, tiles=FLASHOMNI_TILES, warm=False)


RUNS = {"computed": computed_steps, "fifty": fifty_steps, "flashomni": flashomni_steps, "memory": memory_budget}


@contextmanager
def _forced_density(rows: float, tiles: float) -> Iterator[None]:
    """Policies choose as ever, and random rows and tiles of these densities take the place of their choice."""
    choose_rows, choose_tiles = flashomni.row_bits, sparge.tile_bits

    def random_rows(probabilities: torch.Tensor, layout: TokenLayout, *arguments: Any) -> torch.Tensor:
        choose_rows(probabilities, layout, *arguments)
        batch, heads, blocks, _ = probabilities.shape
        mask = torch.rand(batch, blocks, heads, device=probabilities.device) < rows
        mask[:, layout.text_blocks] = True  # as every policy must: nothing is forecast for text
        return pack_bits(mask)

    def random_tiles(probabilities: torch.Tensor, layout: TokenLayout, *arguments: Any) -> torch.Tensor:
        choose_tiles(probabilities, layout, *arguments)
        return pack_bits(torch.rand(probabilities.shape, device=probabilities.device) < tiles)

    with patch.object(flashomni, "row_bits", random_rows), patch.object(sparge, "tile_bits", random_tiles):
        yield


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[dict[str, float | None]]:
    """Fills in the most GiB that was allocated within the block; None on a CPU."""
    figures: dict[str, float | None] = {"peak_gib": None}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield figures
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30


def _stopwatch(device: torch.device) -> Callable[[], float]:
    """Starts a clock; the function it returns waits for the device and gives milliseconds."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * time.perf_counter()

    started = now()
    return lambda: now() - started


def _run_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown run {unknown[0]!r}; runs are {', '.join(RUNS)}, split by commas")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="hunyuan")
    parser.add_argument(
        "--runs",
        type=_run_names,
        default="computed,fifty,flashomni",
        help=f"of {', '.join(RUNS)}, split by commas; default %(default)s",
    )
    parser.add_argument("--plain-steps", type=int, default=PLAIN_STEPS, help="timed; default %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file, written after every run")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    arguments = parser.parse_args()
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    device = "cpu" if arguments.tiny else "cuda"
    bench = Bench((TINY if arguments.tiny else MODELS)[arguments.model], device)
    rows = [bench.plain(arguments.plain_steps)]
    results = {**describe_run(device), "model": arguments.model, "latents": bench.model.latents, "rows": rows}

    def write() -> None:
        shown = {key: rows[-1].get(key) for key in ("run", "ms", "seconds", "ms_by_mode", "steps_by_mode", "peak_gib")}
        print(json.dumps({key: value for key, value in shown.items() if value is not None}), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")

    write()
    for name in arguments.runs:
        for row in RUNS[name](bench, bench.model.family):
            rows.append(row)
            write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
