"""Stopwatches for the CPU and for the GPU's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def stopwatch_of(timestep: torch.Tensor | float) -> Callable[[], Callable[[], float]]:
    """On the clock of the device that a call's timestep is on."""
    return stopwatch_on(timestep.device) if isinstance(timestep, torch.Tensor) else stopwatch()


def stopwatch_on(device: torch.device) -> Callable[[], Callable[[], float]]:
    """On a device's own clock if it is a GPU, else on the host's."""
    return gpu_stopwatch(device) if device.type == "cuda" else stopwatch()


def stopwatch() -> Callable[[], Callable[[], float]]:
    """Starts; the first call stops and returns a function that gives the seconds."""
    started = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - started
        return lambda: seconds

    return stop


def gpu_stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """The same on the GPU's own clock, without waiting for it until the seconds are asked for."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(torch.cuda.current_stream(device))

    def stop() -> Callable[[], float]:
        end.record(torch.cuda.current_stream(device))

        def seconds() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1000

        return seconds

    return stop
