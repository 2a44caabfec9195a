"""Caches of tensors for later calls, safe with captures of CUDA graphs that read them.

A tensor made during a capture is uninitialised until its graph is replayed, and earlier graphs of the same memory pool
overwrite it. So it belongs to its capture, and no cache may keep it. A tensor that a graph reads from a cache must live
as long as the graph, even if the cache drops it.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

Value = TypeVar("Value")
_THREAD = threading.local()  # `capture` = the thread's capture in progress


class Capture:
    """A capture in progress: values that it read from caches, and those it computed instead, by cache and key."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.results: dict[tuple[int, Hashable], Any] = {}


@contextmanager
def capturing() -> Iterator[Capture]:
    """Mark this thread as capturing."""
    before, _THREAD.capture = _current(), Capture()
    try:
        yield _THREAD.capture
    finally:
        _THREAD.capture = before


def is_capturing() -> bool:
    """Return True if this thread is capturing, so that its computations run later, in replays."""
    return _current() is not None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def hold(value: Value) -> Value:
    """Keep ``value`` as long as the graph that is being captured, if one is; returns it."""
    if (capture := _current()) is not None:
        capture.held.append(value)
    return value


class Kept(Generic[Value]):
    """The ``most`` latest values by key; the oldest is dropped first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, Value] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of a key. ``make`` makes a missing one; during a capture it is kept for the capture only."""
        value, capture = self._values.get(key), _current()
        if value is not None:
            return hold(value)
        if capture is not None and (id(self), key) in capture.results:
            return capture.results[id(self), key]
        value = make()
        if capture is not None:
            capture.results[id(self), key] = value
        elif not is_capturing():
            while len(self._values) >= self._most:
                self._values.pop(next(iter(self._values)), None)
            self._values[key] = value
        return value


def _current() -> Capture | None:
    return getattr(_THREAD, "capture", None)
