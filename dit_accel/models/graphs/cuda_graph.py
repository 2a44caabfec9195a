"""CUDA graphs of one function: decide if capturing helps, capture, and replay. Tests on a CPU replace it by a fake."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dit_accel.loop import timing
from dit_accel.models.free_memory import FreeMemory, read_memory, why_no_graph

if TYPE_CHECKING:
    from dit_accel.models.graphs.collectives import Collective

LAUNCHES = 0.8  # share of a step's time spent in launches from which the step is launch-bound and captured
SHARED_LAUNCHES = 0.5  # the same share with several ranks, where a step includes waiting for other ranks


@dataclass(frozen=True)
class CaptureTrial:
    """Measurement of an uncaptured step."""

    waits: str | None  # code line in which the host waited for the GPU
    launched: Callable[[], float]  # returns the seconds that the host took
    took: Callable[[], float]  # returns the seconds that the GPU took, from start to end
    peak: int = 0  # bytes of the GPU that the step took at its peak, above what was allocated at its start
    is_complete: bool = True  # False = waits may have been missed, so the next step is measured again

    def why_not(self, wanted: str, memory: FreeMemory, *, is_shared: bool = False) -> str | None:
        """Return why steps are not captured if `kernels.graphs` is ``wanted``, or None; ``is_shared`` by devices."""
        if self.waits is not None:
            return f"the host waits for the GPU in {self.waits}"
        if wanted == "always":
            return None
        launched, took = self.launched(), self.took()
        if launched >= (SHARED_LAUNCHES if is_shared else LAUNCHES) * took:
            return why_no_graph(memory, self.peak)
        return f"the step is not launch-bound: launches take {1000 * launched:.0f} ms of {1000 * took:.0f} ms"


SYNCHRONIZES = "called a synchronizing CUDA operation"  # beginning of PyTorch's warning
HIDDEN = (SYNCHRONIZES, "Synchronization debug mode")  # the second: PyTorch warns that this mode is a prototype
_ALONE = threading.Lock()  # captures share a stream
_stream_on = cache(torch.cuda.Stream)  # by device


class Waits:
    """Context that notes where this thread waits for the GPU, by PyTorch's warnings, which it hides in all threads.

    Python asks a filter's ``match`` about every message, and the class is such a filter. It stays clear of
    ``warnings.catch_warnings``, which at its end overwrites filters that other threads have set.
    """

    _open: ClassVar[list[Waits]] = []
    _lock = threading.Lock()
    _mode: ClassVar[int] = 0  # PyTorch's sync debug mode before the first

    def __init__(self) -> None:
        self.places: list[str] = []  # file and line of each wait
        self.is_complete = True  # no other thread has removed the filter
        self._thread = threading.get_ident()

    @classmethod
    def match(cls, message: str) -> bool:
        """Note a wait of a thread that watches; return True if the message is hidden."""
        if not cls._open or not message.startswith(HIDDEN):
            return False
        frame, thread = sys._getframe(1), threading.get_ident()
        for item in cls._open:
            if item._thread == thread and message.startswith(SYNCHRONIZES):
                item.places.append(f"{frame.f_code.co_filename}, line {frame.f_lineno}")
        return True

    def __enter__(self) -> Waits:
        with self._lock:
            if not self._open:
                Waits._mode = torch.cuda.get_sync_debug_mode()
            self._open.append(self)
            warnings.filterwarnings("ignore", message=__name__)  # has Python forget which messages it has shown
            warnings.filters[0] = FILTER
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.is_complete = FILTER in warnings.filters
            if len(self._open) == 1:
                torch.cuda.set_sync_debug_mode(self._mode)
                warnings.filters[:] = [item for item in warnings.filters if item is not FILTER]
            self._open.remove(self)


FILTER = ("ignore", Waits, Warning, None, 0)
EMPTY = ("ignore", re.compile("The CUDA Graph is empty"), Warning, None, 0)  # between two collectives


class Turns:
    """Serialises uses of the same GPU memory from several streams. Callers hold a lock."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None  # the end of the latest use

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Use the memory on the current stream, after the previous use has ended."""
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(device)
        if self._last is not None:
            stream.wait_event(self._last)
        try:
            yield
        finally:
            self._last = torch.cuda.Event()
            self._last.record(stream)

    def end(self) -> None:
        """Wait until the GPU has ended the latest use, so that the memory may be freed."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


class CudaGraph:
    """One captured function: a graph, or several with the collectives of `torch.distributed` between them."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device, self._pool = device, pool
        self._parts: list[Callable[[], None]] = []
        self._capturing: Any = None

    memory = staticmethod(read_memory)
    new_pool = staticmethod(torch.cuda.graph_pool_handle)  # of graphs that are never replayed at the same time

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Return why nothing can be captured on a device now, or None."""
        if device.type != "cuda" or torch.version.cuda is None:
            return f"computes on {device.type}"
        if torch.cuda.get_allocator_backend() == "pluggable":  # which counts no memory
            return "another allocator than PyTorch's is set"
        return "the stream is already being captured" if torch.cuda.is_current_stream_capturing() else None

    @staticmethod
    def watch(function: Callable[[], Any], device: torch.device) -> tuple[Any, CaptureTrial]:
        """Run ``function``; return its result and a measurement."""
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        # Waits make a capture fail, which corrupts random generators (and, before PyTorch 2.12, memory).
        with Waits() as waits:
            of_gpu, of_host = timing.gpu_stopwatch(device), timing.stopwatch()
            output = function()
            launched, took = of_host(), of_gpu()
        where = next(iter(waits.places), None)
        peak = torch.cuda.max_memory_allocated(device) - before
        return output, CaptureTrial(where, launched, took, peak, waits.is_complete)

    def capture(self, function: Callable[[], Any]) -> Any:
        """Capture ``function`` and return its result; its tensors are uninitialised until :meth:`replay` fills them.

        Raises:
            UnsupportedError: the function communicates by other means than functional collectives.
        """
        cutting: AbstractContextManager = nullcontext()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from dit_accel.models.graphs.collectives import CutAtCollectives  # fails in torch built without collectives

            cutting = CutAtCollectives(self._cut)
        with _ALONE, self._aside():
            self._begin()
            try:
                with cutting:
                    return function()
            finally:
                self._end()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Select the device, and restore the stream at the end, because a failed capture leaves its own stream."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            try:
                yield
            finally:
                torch.cuda.set_stream(current)

    def _cut(self, collective: Collective) -> None:
        self._end()
        self._parts.append(collective.unowned().run)
        self._begin()

    def _begin(self) -> None:
        graph, stream = torch.cuda.CUDAGraph(), _stream_on(self._device)
        self._capturing = torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local")
        self._capturing.__enter__()
        self._parts.append(graph.replay)

    def _end(self) -> None:
        warnings.filters.insert(0, EMPTY)
        try:
            self._capturing.__exit__(None, None, None)
        finally:
            with suppress(ValueError):  # another thread has removed it
                warnings.filters.remove(EMPTY)

    def replay(self) -> None:
        for part in self._parts:
            part()
