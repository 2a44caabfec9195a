"""Memory and time of a device."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, float | None]]:
    """Record the peak of allocated memory within the block, in GiB; None on a CPU."""
    figures: dict[str, float | None] = {"peak_gib": None}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield figures
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Limit the memory that this process may allocate on a GPU, and begin to record its peak; None = no limit."""
    if device.type != "cuda":
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    share = 1.0 if gib is None else min(gib * 2**30 / total, 1.0)
    torch.cuda.set_per_process_memory_fraction(share, device.index)  # torch refuses a device without an index
    torch.cuda.reset_peak_memory_stats()


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Start a clock; the returned function waits for the device and returns milliseconds."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * time.perf_counter()

    started = now()
    return lambda: now() - started
