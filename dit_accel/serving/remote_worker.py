"""A worker in a process of its own, one for each GPU of a server; a new process replaces one that dies or hangs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from dit_accel.errors import BatchError
from dit_accel.serving.dispatcher import Cancelled
from dit_accel.serving.engine import Loaded, Made
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker_process import LocalProcess

if TYPE_CHECKING:
    from dit_accel.presets import Preset

logger = logging.getLogger(__name__)

LONGEST_LOAD = 1800.0  # seconds that a new process has to load the pipeline again


class LoadError(BatchError):
    """Error of a worker that can't load its pipeline again."""


class WorkerProcess(Protocol):
    """A process with a pipeline; :mod:`~dit_accel.serving.worker_process` has its messages.

    ``log`` says where the reason of its death is.
    """

    log: str

    def send(self, message: Any) -> None: ...

    def receive(self, patience: float | None) -> Any:
        """Return the next message; raise ``TimeoutError``, or ``EOFError`` or ``OSError`` if the process died."""

    def end(self) -> None:
        """End the process, whatever it does."""


class RemoteWorker:
    """A :class:`~dit_accel.serving.worker.Worker` in its own process; its errors are raised here.

    Args:
        patience: most seconds of a step, of the time before the first one, and of the time after the last one; None =
            no limit.
        start: starts the process.
        attempts: for each call.
    """

    def __init__(
        self,
        setup: Setup,
        patience: float | None,
        start: Callable[[Setup], WorkerProcess] = LocalProcess,
        attempts: int = 2,
    ) -> None:
        self._setup, self._patience, self._start, self._attempts = setup, patience, start, attempts
        self._is_lost = False  # True: the pipeline could not be loaded again
        self._is_closed, self._changing = False, Lock()
        self._process = start(setup)

    def wait(self, patience: float | None = None) -> Loaded:
        """Wait until the pipeline is loaded, up to ``patience`` seconds; None = no limit.

        Raises:
            BatchError: the process died.
            TimeoutError: it takes longer.
        """
        try:
            return self._receive(patience)
        except EOFError:
            raise BatchError(f"the process that loads {self._setup.model} died; {self._process.log}") from None

    def run(self, jobs: Sequence[Job], preset: Preset | None, suffix: str, tell: Callable[..., None]) -> list[Made]:
        """Run jobs as a :class:`~dit_accel.serving.worker.Worker`, again in a new process if the process dies.

        Raises:
            LoadError: the pipeline can't be loaded again.
            BatchError: the process hangs, or died in every attempt.
        """
        for attempt in range(1, self._attempts + 1):
            if attempt > 1 or self._is_lost:
                self.restart()
            try:
                self._process.send((jobs, preset, suffix))
                return self._follow(tell)
            except TimeoutError:
                logger.error("the process of %s did not respond for %g s", self._setup.model, self._patience)
                raise BatchError(f"a step of the request took more than {self._patience:g} seconds") from None
            except (EOFError, OSError):
                logger.error("the process of %s died, attempt %d of %d", self._setup.model, attempt, self._attempts)
        raise BatchError("the process that ran the request died")

    def restart(self) -> Loaded:
        """Kill the process, and load the pipeline in a new one.

        Raises:
            LoadError: the pipeline can't be loaded again, or the worker is closed.
        """
        self._is_lost = True
        try:
            with self._changing:
                self._process.end()
                if self._is_closed:
                    raise BatchError("the server is shutting down")
                self._process = self._start(self._setup)
            loaded = self.wait(LONGEST_LOAD)
        except Exception as error:
            if not self._is_closed:
                logger.exception("%s can't be loaded again", self._setup.model)
            with self._changing:
                self._process.end()
            raise LoadError("the pipeline can't be loaded again") from error
        self._is_lost = False
        return loaded

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        with self._changing:
            self._process.end()

    def _follow(self, tell: Callable[..., None]) -> list[Made]:
        """Answer the steps of a run until it ends."""
        while not isinstance(event := self._receive(self._patience), list):
            try:
                tell(*event)
            except Cancelled:
                self._process.send(False)
            else:
                self._process.send(True)
        return event

    def _receive(self, patience: float | None) -> Any:
        event = self._process.receive(patience)
        if isinstance(event, Exception):
            raise event
        return event
