"""Tensors that are made once and kept for later calls, and captures of CUDA graphs that read them.

A tensor that is made during a capture holds nothing until its graph is replayed, and earlier graphs of the same memory
pool overwrite it. So it belongs to its capture, and no cache may keep it. A tensor that a graph reads from a cache must
live as long as the graph, whatever the cache drops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

Value = TypeVar("Value")
_THREAD = threading.local()  # its `capture` = that in progress


class Capture:
    """A capture in progress.

    Args:
        held: what it has read from caches.
        made: what it has made in their place, by cache and key.
    """

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.made: dict[tuple[int, Hashable], Any] = {}


@contextmanager
def capturing() -> Iterator[Capture]:
    """Within, this thread captures."""
    before, _THREAD.capture = _current(), Capture()
    try:
        yield _THREAD.capture
    finally:
        _THREAD.capture = before


def is_capturing() -> bool:
    """Return True if what this thread computes now is computed later, by whoever replays it."""
    return _current() is not None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def hold(value: Value) -> Value:
    """Keep ``value`` as long as the graph that is being captured, if one is; returns it."""
    capture = _current()
    if capture is not None:
        capture.held.append(value)
    return value


class Kept(Generic[Value]):
    """The latest values by key.

    Args:
        most: values that are kept; the oldest goes first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, Value] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; ``make`` makes it where it is missing, in a capture for that capture alone."""
        value, capture = self._values.get(key), _current()
        if value is not None:
            return hold(value)
        if capture is not None and (id(self), key) in capture.made:
            return capture.made[id(self), key]
        value = make()
        if capture is not None:
            capture.made[id(self), key] = value
        elif not is_capturing():
            while len(self._values) >= self._most:
                self._values.pop(next(iter(self._values)), None)
            self._values[key] = value
        return value


def _current() -> Capture | None:
    return getattr(_THREAD, "capture", None)
