"""CUDA graphs of one function: whether they pay, capture and replay. Tests on a CPU put a fake in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from dit_accel.loop import timing
from dit_accel.models.graphs.thread_warnings import taken_aside

if TYPE_CHECKING:
    from dit_accel.models.graphs.collectives import Collective

LAUNCHES = 0.8  # share of a step; below, the host waits for a full queue of launches rather than the GPU for the host
SHARED_LAUNCHES = 0.5  # likewise, of a rank whose GPU waits for other ranks' launches too
ROOM = 0.25  # share of the GPU's memory; graphs keep a step's activations, and what decodes the latents needs room too


@dataclass(frozen=True)
class Trial:
    """How a step went that ran as ever.

    Args:
        waits: where the host waited for the GPU; None = nowhere.
        launched: gives the seconds that the host took.
        took: gives the seconds from the GPU's start to its end.
        room: share of the GPU's memory that is free after the step.
        is_complete: every wait was seen; otherwise the next step is watched as well.
    """

    waits: str | None
    launched: Callable[[], float]
    took: Callable[[], float]
    room: float = 1.0
    is_complete: bool = True

    def why_not(self, wanted: str, *, is_shared: bool = False) -> str | None:
        """Why such steps are not to be captured where `kernels.graphs` is ``wanted``, or None.

        Args:
            is_shared: several devices share the step's tokens, and wait for each other.
        """
        if self.waits is not None:
            return f"the host waits for the GPU in {self.waits}"
        if wanted == "always":
            return None
        if self.room < ROOM:
            return f"{self.room:.0%} of the GPU's memory is free, and graphs keep a step's activations"
        launched, took = self.launched(), self.took()
        if launched >= (SHARED_LAUNCHES if is_shared else LAUNCHES) * took:
            return None
        return f"the GPU does not wait for launches, which take {1000 * launched:.0f} ms of {1000 * took:.0f}"


SYNCHRONIZES = "called a synchronizing CUDA operation"  # PyTorch's warning begins so
_ALONE = threading.Lock()  # captures share a stream
_MODE_LOCK = threading.Lock()
_WATCHERS: list[int | str] = []  # an entry each: the sync debug mode that it found


class Turns:
    """Uses of the same memory on a GPU, one after the other, whichever streams they are on. Callers hold a lock."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None  # the end of the latest use

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """A use on the current stream, which waits for the one before."""
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
    """One captured function: a graph, or several with the collectives of `torch.distributed` between them.

    All graphs of a pool are replayed one after the other, never side by side.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device, self._pool = device, pool
        self._parts: list[Callable[[], None]] = []
        self._capturing: Any = None

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Why nothing can be captured on a device now, or None."""
        if device.type != "cuda" or torch.version.cuda is None:
            return f"computes on {device.type}"
        return "somebody else captures the stream" if torch.cuda.is_current_stream_capturing() else None

    @staticmethod
    def new_pool() -> Any:
        """Memory that graphs share."""
        return torch.cuda.graph_pool_handle()

    @staticmethod
    def watch(function: Callable[[], Any], device: torch.device) -> tuple[Any, Trial]:
        """What ``function`` returns, and how it went.

        Where the host waits for the GPU a capture fails, and then leaves random generators (and memory, before PyTorch
        2.12) in disorder.
        """
        with (
            taken_aside("Synchronization debug mode"),  # which is said to be a prototype
            taken_aside(SYNCHRONIZES, hides_others=True) as waits,
            _sync_warnings(),
        ):
            of_gpu, of_host = timing.gpu_stopwatch(device), timing.stopwatch()
            output = function()
            launched, took = of_host(), of_gpu()
        where = next(iter(waits.places), None)
        return output, Trial(where, launched, took, _room(device), waits.is_complete)

    def capture(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns, whose tensors :meth:`replay` fills; before that they hold anything.

        Raises:
            UnsupportedError: it communicates otherwise than by functional collectives.
        """
        with _ALONE, self._aside():
            self._begin()
            try:
                with self._cutting():
                    return function()
            finally:
                self._end()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the device, and in the end on the stream of before, for which a capture that fails leaves its own."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            try:
                yield
            finally:
                torch.cuda.set_stream(current)

    def _cutting(self) -> AbstractContextManager:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return nullcontext()
        from dit_accel.models.graphs.collectives import CutAtCollectives  # which torch built without them can't import

        return CutAtCollectives(self._cut)

    def _cut(self, collective: Collective) -> None:
        self._end()
        self._parts.append(collective.unowned().run)
        self._begin()

    def _begin(self) -> None:
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self._device)
        self._capturing = torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local")
        self._capturing.__enter__()
        self._parts.append(graph.replay)

    def _end(self) -> None:
        with taken_aside("The CUDA Graph is empty"):  # between two collectives
            self._capturing.__exit__(None, None, None)

    def replay(self) -> None:
        for part in self._parts:
            part()


@contextmanager
def _sync_warnings() -> Iterator[None]:
    """Within, PyTorch warns where a thread waits for the GPU; the mode is the whole process's."""
    with _MODE_LOCK:
        _WATCHERS.append(torch.cuda.get_sync_debug_mode() if not _WATCHERS else _WATCHERS[0])
        torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        with _MODE_LOCK:
            mode = _WATCHERS.pop()
            if not _WATCHERS:
                torch.cuda.set_sync_debug_mode(mode)


def _room(device: torch.device) -> float:
    """Share of a GPU's memory that is free; what PyTorch keeps for the next step's activations is not."""
    free, total = torch.cuda.mem_get_info(device)
    return free / total


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
