"""Runs over the same transformers by several pipelines or threads, each with its own controller.

The calling pipeline identifies the run, also in another pipeline's callback or in another thread; without a pipeline
the thread does. A transformer computes one call at a time, because its hooks and kernels hold state of the call in
progress. A change of these, from any thread, is made between calls; it waits for none (:func:`between_calls`).
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.errors import headline
from dit_accel.loop.controller import Controller


class Runs:
    """Controllers of some transformers, by caller, ``first`` of the pipeline that they belong to."""

    def __init__(self, make: Callable[[Any], Controller], first: Any = None) -> None:
        self._make = make  # from a pipeline, which it must not keep alive, or None for a loop without a pipeline
        self._of_pipelines = WeakIdKeyDictionary()
        self._of_threads: dict[int, Controller] = {}
        self._lock = threading.RLock()  # held during a call or a change
        self._table = threading.RLock()  # guards the controllers; nothing waits while it is held
        self._in_thread = threading.local()
        self._depth = 0  # number of nested calls in progress
        self._due: list[Callable[[], None]] = []  # changes to make once the call in progress is over
        self._is_changing = False  # one of these is being made
        # Pipeline and controller of the latest request: looking them up takes 14 calls of Python.
        self._known: tuple[Callable[[], Any], Callable[[], Controller | None]] = (lambda: None, lambda: None)
        self._newest: Controller = self.of(first)  # of the latest call

    def of(self, pipeline: Any) -> Controller:
        """Return the controller of a pipeline, or of this thread if it is None; created at the first request."""
        known, controller = self._known
        if pipeline is not None and known() is pipeline and (found := controller()) is not None:
            return found
        with self._table:
            if pipeline is not None:
                if pipeline not in self._of_pipelines:
                    self._of_pipelines[pipeline] = self._make(pipeline)
                found = self._of_pipelines[pipeline]
                self._known = weakref.ref(pipeline), weakref.ref(found)
                return found
            thread = threading.get_ident()
            if thread not in self._of_threads:
                alive = {item.ident for item in threading.enumerate()}
                self._of_threads = {item: kept for item, kept in self._of_threads.items() if item in alive}
                self._of_threads[thread] = self._make(None)
            return self._of_threads[thread]

    def begin(self, pipeline: Any) -> Controller:
        """Reserve the transformers for a call of this pipeline, or of this thread if it is None; calls may nest."""
        self._lock.acquire()
        try:
            self._in_thread.latest = self._newest = self.of(pipeline)
        except BaseException:
            self._release()
            raise
        self._depth += 1
        return self._newest

    def end(self) -> None:
        """End the call that began last."""
        self._depth -= 1
        if self._due:
            self._make_due_changes()  # before another thread's call can begin
        self._release()

    @property
    def latest(self) -> Controller:
        """Controller of this thread's latest call; if this thread made none, of the latest call."""
        return getattr(self._in_thread, "latest", self._newest)

    def all(self) -> list[Controller]:
        with self._table:
            return [*self._of_pipelines.values(), *self._of_threads.values()]

    def reset(self) -> None:
        """Drop all caches and reports; if a call is in progress, once it is over."""
        between_calls(lambda: [self], lambda: [controller.reset() for controller in self.all()])

    def _reserve(self) -> bool:
        """Keep calls from beginning until :meth:`_release`; return False, without waiting, if one is in progress."""
        if not self._lock.acquire(blocking=False):
            return False
        if self._depth:
            self._lock.release()
        return self._depth == 0

    def _release(self) -> None:
        self._lock.release()
        if self._due:
            self._make_due_changes()

    def _make_due_changes(self) -> None:
        """Make the changes that are due; a call or another change that is in progress makes them at its end."""
        while self._due and not self._is_changing and self._reserve():
            self._is_changing = True
            try:
                if self._due:
                    self._due.pop(0)()
            except Exception as error:  # the call that has ended is not to blame
                warnings.warn(f"dit-accel: a change during a call failed: {headline(error)}", stacklevel=2)
            finally:
                self._is_changing = False
                self._lock.release()


def between_calls(runs: Callable[[], Sequence[Runs]], change: Callable[[], object]) -> None:
    """Make a change now, or if a transformer's call is in progress, at the end of the call. Never waits.

    ``runs`` returns the runs over all transformers that the change affects, which earlier changes may replace. An error
    of ``change`` is raised here if it is made now; later it is a warning.
    """
    with ExitStack() as reserved:
        for item in runs():
            if not item._reserve():
                item._due.append(partial(between_calls, runs, change))
                reserved.callback(item._make_due_changes)  # the call may have ended since
                return
            reserved.callback(item._release)
            item._make_due_changes()  # in their order
        change()
