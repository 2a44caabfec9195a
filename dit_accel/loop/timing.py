"""Measure the seconds of a pipeline's call by part, with the host's clock or CUDA events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import torch

REST = "rest"
Stopwatch = Callable[[], Callable[[], float]]  # stops, and returns a function that gives the seconds


def stopwatch_of(timestep: torch.Tensor | float) -> Stopwatch:
    """Start a stopwatch on the device of a call's timestep."""
    return stopwatch_on(timestep.device) if isinstance(timestep, torch.Tensor) else stopwatch()


def stopwatch_on(device: torch.device) -> Stopwatch:
    """Start a stopwatch: CUDA events on a GPU, otherwise the host's clock."""
    return gpu_stopwatch(device) if device.type == "cuda" else stopwatch()


def stopwatch() -> Stopwatch:
    """Start a stopwatch on the host's clock; a call stops it and returns a function that gives the seconds."""
    started = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - started
        return lambda: seconds

    return stop


def gpu_stopwatch(device: torch.device) -> Stopwatch:
    """Start a stopwatch of CUDA events; only reading the seconds waits for the GPU."""
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

    A part that runs inside another part, such as a ControlNet whose call was deferred, counts as the outer part. Parts
    outside of a call, or in another thread, are not recorded. ``device`` is the device whose clock is read.

    Attributes:
        remark_of: functions that say how a part has just run, by its name.
        remarks: what they said about the parts of the latest run.
        at_beginning: called when a call begins.
        runs: denoising runs that the latest call has begun: one for each chunk, segment or stage of some videos.
        started: time at which the call in progress began, of ``time.perf_counter``; None = no beginning is known.
        previous: seconds by part of the call before, if ``keeps_previous``, whose reading may wait for the GPU.
        previous_runs: its number of runs.
        notice: begins a call if a part is the first of one; for a pipeline whose calls have no watched beginning.
    """

    def __init__(self) -> None:
        self._stop: Stopwatch | None = None  # stopwatch of the call in progress
        self._whole: Callable[[], float] | None = None  # seconds of the finished call
        self._open: list[tuple[str, Stopwatch]] = []
        self._times: list[tuple[str, Callable[[], float]]] = []
        self._thread: int | None = None  # of the call; None = a pipeline whose calls have no known beginning
        self.remark_of: dict[str, Callable[[], str]] = {}
        self.remarks: dict[str, str] = {}
        self.at_beginning: list[Callable[[], None]] = []
        self.notice: Callable[[], None] = lambda: None
        self.device = torch.device("cpu")
        self.begun = 0  # calls so far
        self.started: float | None = None
        self.keeps_previous = False
        self.previous: dict[str, float] = {}
        self.runs, self.previous_runs = 0, 1

    def __reduce__(self) -> tuple[type[CallParts], tuple[()]]:
        """Copy or pickle as an empty object, together with a component that it times."""
        return CallParts, ()

    def begin(self, device: torch.device) -> None:
        """Begin a call, and drop the times of the previous one, even if that did not end."""
        if self.keeps_previous:
            self.take_previous(self)
        self.started = time.perf_counter()
        self.device, self._whole = device, None
        self.begun, self.runs = self.begun + 1, 0
        self._open.clear()
        self._times.clear()
        self._thread = threading.get_ident()
        self._stop = stopwatch_on(device)
        for notify in self.at_beginning:
            notify()

    def enter(self, name: str, elapsed: Stopwatch | None = None) -> None:
        """Begin a part, which may be inside of another part.

        Args:
            elapsed: a stopwatch that is already running; None = start a new one.
        """
        self.notice()
        if not self._is_elsewhere():
            self._open.append((name, elapsed or stopwatch_on(self.device)))

    def leave(self) -> None:
        """End the part that began last."""
        if not self._open or self._is_elsewhere():  # it began before the call did
            return
        name, elapsed = self._open.pop()
        if self._open:
            return
        if self._stop is not None:
            self._times.append((name, elapsed()))
        remark = self.remark_of.get(name)  # another thread may remove it
        if remark is not None and (self._stop is not None or self._thread is None):
            self.remarks[name] = remark()

    def _is_elsewhere(self) -> bool:
        return self._thread not in (None, threading.get_ident())

    def end(self) -> None:
        """End the call."""
        if self._stop is not None:
            self._whole, self._stop, self.started = self._stop(), None, None

    def take_previous(self, earlier: CallParts) -> None:
        """Take the seconds of the last call that an earlier preset's object has measured, unless that call failed."""
        if REST in (seconds := earlier.seconds()):
            self.previous, self.previous_runs = seconds, earlier.runs

    def bounds(self, transformers: Collection[str]) -> tuple[float, float]:
        """Return when the present call began, and how many seconds the previous one took after its transformers."""
        names = list(self.previous)
        last = max((names.index(name) for name in transformers if name in names), default=len(names))
        return self.started or time.perf_counter(), sum(self.previous[name] for name in names[last + 1 :])

    def seconds(self) -> dict[str, float]:
        """Return the seconds by part, in the order of the call, and ``rest`` after its end. Waits for the GPU."""
        found: dict[str, float] = {}
        for name, seconds in self._times:
            found[name] = found.get(name, 0.0) + seconds()
        return found if self._whole is None else {**found, REST: max(self._whole() - sum(found.values()), 0.0)}
