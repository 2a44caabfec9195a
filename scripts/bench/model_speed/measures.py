"""Memory and time of a device."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, float | None]]:
    """Record the peaks of allocated and of reserved memory within the block, in GiB; None on a CPU."""
    figures: dict[str, float | None] = {"peak_gib": None, "reserved_gib": None}
    if device.type != "cuda":
        yield figures
        return
    reset, peaks = torch.cuda.reset_peak_memory_stats, []

    def note(*_: Any) -> None:
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        reset()

    torch.cuda.empty_cache()
    reset()
    with patch.object(torch.cuda, "reset_peak_memory_stats", note):  # a step is measured before its capture
        yield figures
    note()
    figures |= {name: max(peak) / 2**30 for name, peak in zip(figures, zip(*peaks, strict=True), strict=True)}


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Limit the memory that this process may allocate on a GPU, and begin to record its peak; None = no limit."""
    if device.type != "cuda":
        return
    gc.collect()
    torch.cuda.empty_cache()
    share = 1.0 if gib is None else min(gib * 2**30 / torch.cuda.get_device_properties(device).total_memory, 1.0)
    torch.cuda.set_per_process_memory_fraction(share, device.index)  # torch refuses a device without an index
    torch.cuda.reset_peak_memory_stats()


def profiled(run: Iterator[Any], steps: int) -> list[Any]:
    """GPU activities in the next steps of a run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            next(run)
        torch.cuda.synchronize()
    return [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Start a clock; the returned function waits for the device and returns milliseconds."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * time.perf_counter()

    started = now()
    return lambda: now() - started
