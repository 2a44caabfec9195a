"""Runs over the same transformers by several pipelines or threads, each with its own controller.

The calling pipeline identifies the run. So a pipeline that is called from another pipeline's callback, or in another
thread, finds its own records and its own scheduler. Calls without a pipeline are identified by their thread. A
transformer computes one call at a time, because its hooks and kernels hold state of the call in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.loop.controller import Controller


class Runs:
    """Controllers of some transformers, by caller.

    Args:
        make: creates the controller of a pipeline, which it must not keep alive; None = a loop without a pipeline.
        first: pipeline that the transformers belong to, or None.

    Attributes:
        current: controller of the call in progress, otherwise of the latest call.
    """

    def __init__(self, make: Callable[[Any], Controller], first: Any = None) -> None:
        self._make = make
        self._of_pipelines = WeakIdKeyDictionary()
        self._of_threads: dict[int, Controller] = {}
        self._lock = threading.RLock()
        self._in_thread = threading.local()
        self._depth = 0  # number of nested calls in progress
        self._is_reset_due = False  # once the call in progress is over
        self.caller: Any = None  # the pipeline of the call in progress
        self.current = self.of(first)

    def of(self, pipeline: Any) -> Controller:
        """Return the controller of a pipeline, or of this thread if it is None; created at the first request."""
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
        """Reserve the transformers for a call of this pipeline, or of this thread if it is None.

        Calls may nest, for example if arguments come from another device; the outer call then stays in progress.
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
                if self._is_reset_due and self._depth == 0:
                    self.reset()

    @property
    def latest(self) -> Controller:
        """Controller of this thread's latest call; if this thread made none, of the latest call."""
        return getattr(self._in_thread, "latest", self.current)

    def all(self) -> list[Controller]:
        """Return the controllers of all callers."""
        return [*self._of_pipelines.values(), *self._of_threads.values()]

    def reset(self) -> None:
        """Drop all caches and reports; if this thread's call is in progress, once it is over."""
        with self._lock:
            self._is_reset_due = self._depth > 0
            if self._is_reset_due:
                return
            for controller in self.all():
                controller.reset()
