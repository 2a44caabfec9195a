"""CUDA graphs of one function: whether they pay, capture and replay. Tests on a CPU put a fake in their place."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from dit_accel.loop import timing

if TYPE_CHECKING:
    from dit_accel.models.collectives import Collective

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
    """

    waits: str | None
    launched: Callable[[], float]
    took: Callable[[], float]
    room: float = 1.0

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


_ALONE = threading.Lock()  # a watch sets what is the whole process's, and captures share a stream


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
        waits = None
        with _ALONE, warnings.catch_warnings(record=True) as caught:
            mode = torch.cuda.get_sync_debug_mode()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            of_gpu, of_host = timing.gpu_stopwatch(device), timing.stopwatch()
            try:
                output = function()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            launched, took = of_host(), of_gpu()
        for each in caught:
            message = str(each.message)
            if message.startswith("called a synchronizing CUDA operation"):
                waits = waits or f"{each.filename}, line {each.lineno}"
            elif not message.startswith("Synchronization debug mode"):  # which is said to be a prototype
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return output, Trial(waits, launched, took, _room(device))

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
        from dit_accel.models.collectives import CutAtCollectives  # which torch built without them can't import

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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # between two collectives
            self._capturing.__exit__(None, None, None)

    def replay(self) -> None:
        for part in self._parts:
            part()


def _room(device: torch.device) -> float:
    """Share of a GPU's memory that is free; what PyTorch keeps for the next step's activations is not."""
    free, total = torch.cuda.mem_get_info(device)
    return free / total


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
