"""Run one model on one device in the denoising loop of its pipeline; measure step times and GPU occupancy."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.attention_dispatch import attention_backend

from dit_accel import Preset, accelerate_pipeline, restore_pipeline
from dit_accel.errors import headline
from dit_accel.pipeline import Acceleration

from .forced import forced_density
from .measures import peak_memory, profiled, stopwatch
from .models import Model, batch, variant

STEPS = 50
TIMED_STEPS = 3  # a dense step varies by less than 1%
UNPROFILED_STEPS = 4  # by then a loop has launched every kernel, including those with the longest history
PROFILED_STEPS = 2
OF_REPORT = ("estimated_bytes", "memory_measures", "replayed", "not_captured", "notes", "fallbacks")  # kept with a row
CUDNN = "_native_cudnn"  # diffusers' name for torch attention with cuDNN only; "native" lets torch choose


class Bench:
    """Model with a scheduler, which `accelerate_pipeline` accepts like a pipeline; in bf16, on a CPU in float32."""

    def __init__(
        self, model: Model, device: str, timed_steps: int = TIMED_STEPS, transformer: torch.nn.Module | None = None
    ) -> None:
        self.model = model
        self.timed_steps = timed_steps
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        with self._building():
            self.transformer = transformer or model.build().eval().requires_grad_(False)
            self.controlnet = model.control_net().eval().requires_grad_(False) if model.control_net else None
            self.conditions = model.conditions(self.controlnet)

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Build modules on the device, in the dtype, from the same seed."""
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(default)

    def variant(self, name: str) -> Bench:
        """Use the same transformer in one of the model's variants."""
        return Bench(variant(self.model, name), self.device.type, self.timed_steps, self.transformer)

    def batch(self, size: int) -> Bench:
        """Use the same transformer with several prompts a call."""
        return Bench(batch(self.model, size), self.device.type, self.timed_steps, self.transformer)

    @torch.no_grad()
    def loop(self, steps: int) -> Iterator[torch.Tensor]:
        """Run a denoising loop like diffusers' pipelines; each ``next`` runs one step and returns the velocity."""
        self.scheduler.set_timesteps(steps, device=self.device)
        self.scheduler.set_begin_index(0)
        latents = torch.randn(self.model.latents, device=self.device, generator=self._seeded())
        context = getattr(self.transformer, "cache_context", nullcontext)  # Krea 2 has none
        for timestep in self.scheduler.timesteps:
            for branch in self.model.branches:
                call = self.conditions(latents.to(self.dtype), timestep.expand(len(latents)))
                with context(branch):
                    velocity = self.transformer(return_dict=False, **call)[0]
            velocity = velocity[:, : latents.shape[1]]  # without Kontext's reference tokens
            latents = self.scheduler.step(velocity.float(), timestep, latents, return_dict=False)[0]
            yield velocity

    def timed(self, run: Iterator[torch.Tensor], steps: int) -> list[float]:
        """Milliseconds of each of the next ``steps`` of a loop, all branches together."""
        milliseconds = []
        for _ in range(steps):
            elapsed = stopwatch(self.device)
            velocity = next(run)
            milliseconds.append(elapsed())
        if not velocity.isfinite().all():
            raise RuntimeError("the run gave values that are no numbers")
        return milliseconds

    def plain(self) -> dict[str, Any]:
        """Time plain diffusers."""
        with peak_memory(self.device) as memory:
            run = self.loop(STEPS)
            self.velocity = next(run)
            self.plain_ms = statistics.median(self.timed(run, self.timed_steps))
        return {"run": "plain", "ms": self.plain_ms, **memory}

    def baseline(self) -> dict[str, Any]:
        """Time the fastest dense run of diffusers: blocks compiled one by one, with torch's default attention or
        cuDNN's, whichever is faster for this model. Failures are noted, and leave the row without a time.
        """
        row: dict[str, Any] = {"run": "baseline", "eager_ms": {"native": self.plain_ms}, "failed": {}}
        with noting_failure(row["failed"], CUDNN), attention_backend(CUDNN):
            row["eager_ms"][CUDNN] = self.timed(self.loop(STEPS), 2)[1]
        for name in sorted(row["eager_ms"], key=row["eager_ms"].get):
            with (
                noting_failure(row["failed"], f"{name}, compiled"),
                attention_backend(name),
                compiled_blocks(self.transformer, self.device),
            ):
                with peak_memory(self.device) as memory:
                    run = self.loop(STEPS)
                    (first,) = self.timed(run, 1)
                    row["ms"] = statistics.median(self.timed(run, self.timed_steps))
                return row | {"attention": name, "first_step_seconds": first / 1000, **memory}
        return row

    def accelerated(
        self,
        run: str,
        preset: Preset,
        steps: int,
        *,
        rows: float = 1.0,
        tiles: float = 1.0,
        keys: float = 1.0,
        warm: int | None = None,
        whole: bool = False,
    ) -> dict[str, Any]:
        """Time one run of a preset with these densities.

        `warm`: steps before the timed ones, in which kernels compile; None = as many. `whole`: the row's `ms` is the
        run's average step, not a computed step.
        """
        with self.accelerating(preset, rows, tiles, keys) as acceleration:
            warm = steps if warm is None else warm
            warm_ms = self.timed(self.loop(steps), warm) if warm else []
            with peak_memory(self.device) as memory:
                times = self.timed(self.loop(steps), steps)
            report = acceleration.report()
        by_mode = _medians((step.mode, ms) for step, ms in zip(report.steps, times, strict=True))
        inside = _medians((step.mode, 1000 * step.seconds) for step in report.steps)
        computed = by_mode["update"] if "update" in by_mode else by_mode["full"]
        return {
            "run": run,
            "ms": statistics.mean(times) if whole else computed,
            "preset": preset.effective(),
            "row_density": rows,
            "tile_density": tiles,
            "key_density": keys,
            "steps": steps,
            "seconds": sum(times) / 1000,
            "warm_ms": warm_ms,
            "ms_by_mode": by_mode,
            "transformer_ms_by_mode": inside,
            "steps_by_mode": report.steps_by_mode,
            "computed_fraction": report.computed_fraction,
            "cache_gib": report.cache_bytes / 2**30,
            **{key: getattr(report, key) for key in OF_REPORT},
            **memory,
        }

    def relative_error(self, preset: Preset) -> float:
        """Relative L2 distance of the run's first velocity from that of the plain run, which :meth:`plain` keeps."""
        with self.accelerating(preset):
            return self.error_of(next(self.loop(STEPS)))

    def error_of(self, velocity: torch.Tensor) -> float:
        """Relative L2 distance of a velocity from the plain run's first one."""
        return ((velocity.float() - self.velocity.float()).norm() / self.velocity.float().norm()).item()

    def occupancy(self, preset: Preset, *, tiles: float = 1.0) -> dict[str, float]:
        """Measure GPU occupancy in consecutive steps: `gpu_idle`, and `gpu_busy_ms` per step; empty on a CPU.

        `gpu_idle` is the share of the time from the first to the last kernel in which no kernel runs: an upper limit,
        because the profiler slows launches.
        """
        if self.device.type == "cpu":
            return {}
        busy, span = busy_and_span((start, end) for _, start, end in self._profiled(preset, tiles))
        return {"gpu_idle": 1 - busy / span, "gpu_busy_ms": busy / PROFILED_STEPS / 1000}  # events are in us

    def kernel_times(self, preset: Preset, *, tiles: float = 1.0) -> list[dict[str, Any]]:
        """Launches and milliseconds of each kernel in a step, longest first; empty on a CPU."""
        if self.device.type == "cpu":
            return []
        times: dict[str, list[float]] = {}
        for name, start, end in self._profiled(preset, tiles):
            times.setdefault(name, []).append((end - start) / 1000)
        rows = [
            {"kernel": name, "launches": len(item) / PROFILED_STEPS, "ms": sum(item) / PROFILED_STEPS}
            for name, item in times.items()
        ]
        return sorted(rows, key=lambda row: -row["ms"])

    def _profiled(self, preset: Preset, tiles: float) -> list[tuple[str, float, float]]:
        """Profile consecutive steps: name, start and end (µs) of each GPU activity."""
        with self.accelerating(preset, tiles=tiles):
            run = self.loop(UNPROFILED_STEPS + PROFILED_STEPS)
            self.timed(run, UNPROFILED_STEPS)
            events = profiled(run, PROFILED_STEPS)
        return [(event.name, event.time_range.start, event.time_range.end) for event in events]

    @contextmanager
    def accelerating(
        self, preset: Preset, rows: float = 1.0, tiles: float = 1.0, keys: float = 1.0
    ) -> Iterator[Acceleration]:
        with forced_density(rows, tiles, keys) if min(rows, tiles, keys) < 1 else nullcontext():
            accelerate_pipeline(self, preset)
            try:
                yield self.dit_accel
            finally:
                restore_pipeline(self)

    def _seeded(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)


def busy_and_span(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Time covered by ``(start, end)`` intervals, counting overlaps once, and the time between their outer ends."""
    ordered = sorted(intervals)
    first, reached = ordered[0]
    busy = reached - first
    for start, end in ordered[1:]:
        busy += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return busy, reached - first


def _medians(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    by_mode: dict[str, list[float]] = {}
    for mode, milliseconds in times:
        by_mode.setdefault(mode, []).append(milliseconds)
    return {mode: statistics.median(part) for mode, part in by_mode.items()}


@contextmanager
def compiled_blocks(transformer: torch.nn.Module, device: torch.device, *, fullgraph: bool = True) -> Iterator[None]:
    """Compile a transformer's blocks one by one, and undo it afterwards."""
    backend = "inductor" if device.type == "cuda" else "eager"
    transformer.compile_repeated_blocks(fullgraph=fullgraph, backend=backend)
    try:
        yield
    finally:
        for module in transformer.modules():
            module._compiled_call_impl = None  # torch has no public API to undo compilation
        torch._dynamo.reset()


@contextmanager
def noting_failure(failed: dict[str, str], what: str) -> Iterator[None]:
    """Note any exception of a kernel or compiler that does not support this model, and go on without it."""
    try:
        yield
    except Exception as error:
        failed[what] = headline(error)
