"""Runs over the same transformers by several pipelines or threads: each has a controller of its own.

A run is told by the pipeline that calls, so a pipeline called from another one's callback, or in another thread, finds
its own records and its own scheduler. Calls of no pipeline are told by their thread. A transformer computes one call at
a time, for its hooks and kernels keep what belongs to the call in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.loop.controller import Controller


class Runs:
    """The controllers of some transformers, by caller.

    Args:
        make: makes the controller of a pipeline, which it must not keep alive; None = of a loop of the caller's own.
        first: pipeline that the transformers belong to, or None.

    Attributes:
        current: controller of the call in progress, or else of the latest one.
    """

    def __init__(self, make: Callable[[Any], Controller], first: Any = None) -> None:
        self._make = make
        self._of_pipelines = WeakIdKeyDictionary()
        self._of_threads: dict[int, Controller] = {}
        self._lock = threading.RLock()
        self._in_thread = threading.local()
        self._depth = 0  # of calls in progress
        self.caller: Any = None  # the pipeline of the call in progress
        self.current = self.of(first)

    def of(self, pipeline: Any) -> Controller:
        """The controller of a pipeline, or of this thread where there is none; made when it is first asked for."""
        with self._lock:
            if pipeline is not None:
                if pipeline not in self._of_pipelines:
                    self._of_pipelines[pipeline] = self._make(pipeline)
                return self._of_pipelines[pipeline]
            thread = threading.get_ident()
            if thread not in self._of_threads:
                alive = {each.ident for each in threading.enumerate()}
                self._of_threads = {each: kept for each, kept in self._of_threads.items() if each in alive}
                self._of_threads[thread] = self._make(None)
            return self._of_threads[thread]

    @contextmanager
    def calling(self, pipeline: Any) -> Iterator[Controller]:
        """Within, the transformers compute a call of this pipeline, or of this thread, and no other.

        A call within another, as where its arguments come from another device, leaves that one in progress.
        """
        with self._lock:
            outer = None if self._depth == 0 else (self.caller, self.current)
            self._depth += 1
            self.caller, self.current = pipeline, self.of(pipeline)
            self._in_thread.latest = self.current
            try:
                yield self.current
            finally:
                self._depth -= 1
                self.caller, self.current = outer or (None, self.current)

    @property
    def latest(self) -> Controller:
        """The controller of the latest call, in this thread if it has made one."""
        return getattr(self._in_thread, "latest", self.current)

    def all(self) -> list[Controller]:
        """Controllers of all callers that there are."""
        return [*self._of_pipelines.values(), *self._of_threads.values()]

    def reset(self) -> None:
        """Forgets all caches and reports."""
        with self._lock:
            for controller in self.all():
                controller.reset()
