"""Seconds of a pipeline's call by part, read from the host's clock or the GPU's own."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

REST = "rest"
Stopwatch = Callable[[], Callable[[], float]]  # stops, and returns what gives the seconds


def stopwatch_of(timestep: torch.Tensor | float) -> Stopwatch:
    """On the clock of the device that a call's timestep is on."""
    return stopwatch_on(timestep.device) if isinstance(timestep, torch.Tensor) else stopwatch()


def stopwatch_on(device: torch.device) -> Stopwatch:
    """On a device's own clock if it is a GPU, else on the host's."""
    return gpu_stopwatch(device) if device.type == "cuda" else stopwatch()


def stopwatch() -> Stopwatch:
    """Starts; the first call stops and returns a function that gives the seconds."""
    started = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - started
        return lambda: seconds

    return stop


def gpu_stopwatch(device: torch.device) -> Stopwatch:
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


class CallParts:
    """Seconds of the last call by part, read at the end, so that timing adds no wait.

    Parts that run inside another, as a ControlNet whose call was deferred, count as that one's. Nothing is kept of what
    runs outside of a call. ``device`` is the one whose clock is read.
    """

    def __init__(self) -> None:
        self._stop: Stopwatch | None = None  # of the call that goes on
        self._whole: Callable[[], float] | None = None  # of the call that is over
        self._open: list[tuple[str, Stopwatch]] = []
        self._times: list[tuple[str, Callable[[], float]]] = []
        self.device = torch.device("cpu")

    def __reduce__(self) -> tuple[type[CallParts], tuple[()]]:
        """Copied or pickled with a component that it times, it has nothing to tell."""
        return CallParts, ()

    def begin(self, device: torch.device) -> None:
        """A call begins; the one before is forgotten, also where it never came to its end."""
        self.device, self._whole = device, None
        self._open.clear()
        self._times.clear()
        self._stop = stopwatch_on(device)

    def enter(self, name: str, elapsed: Stopwatch | None = None) -> None:
        """A part begins, be it inside of another.

        Args:
            elapsed: a stopwatch that runs already; None = one is started.
        """
        self._open.append((name, elapsed or stopwatch_on(self.device)))

    def leave(self) -> None:
        """The part that began last is over."""
        if not self._open:  # it began before the call did
            return
        name, elapsed = self._open.pop()
        if self._stop is not None and not self._open:
            self._times.append((name, elapsed()))

    def end(self) -> None:
        """The call is over."""
        if self._stop is not None:
            self._whole, self._stop = self._stop(), None

    def seconds(self) -> dict[str, float]:
        """By part, in the order of the call; with what is in none of them once the call is over. Waits for the GPU."""
        found: dict[str, float] = {}
        for name, seconds in self._times:
            found[name] = found.get(name, 0.0) + seconds()
        return found if self._whole is None else {**found, REST: max(self._whole() - sum(found.values()), 0.0)}
