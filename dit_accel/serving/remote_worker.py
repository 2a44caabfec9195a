"""A worker in a process of its own, one for each GPU of a server; a new process replaces one that dies or hangs.

The process loads a pipeline and sends :class:`Loaded`. It receives ``(jobs, preset, suffix)``, and sends ``(finished
steps, all steps)`` with the file of a partial image or next bytes of a video after steps, which the server answers with
True, or False to end the run. At the end it sends a list of :class:`Made`; and errors at any time.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dit_accel.errors import BatchError, DitAccelError, OutOfMemoryError, OutputError, headline
from dit_accel.serving.engine import Cancelled, DefectError, Loaded, Made
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.processes import silence_libraries
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker

if TYPE_CHECKING:
    from dit_accel.presets import Preset

logger = logging.getLogger(__name__)

LONGEST_LOAD = 1800.0  # seconds that a new process has to load the pipeline again
BETWEEN_LOADS = 60.0  # seconds before a model that could not be loaded is tried again
LAST_SECONDS = 2.0  # that an idle process has to end, or a killed one


class LoadError(BatchError):
    """Error of a worker that can't load its pipeline again."""


class LocalProcess:
    """A process of this machine; :class:`~dit_accel.serving.ray_cluster.RayActor` is one of a Ray cluster."""

    log = "its log is above"  # where the reason of its death is

    def __init__(self, setup: Setup) -> None:
        context = get_context("spawn")  # a forked process can't use CUDA
        self._link, link = context.Pipe()
        self.process = context.Process(target=_run, args=(link, setup), daemon=True)
        self.process.start()
        link.close()
        self.is_idle = False  # True while the process waits for a message

    def send(self, message: Any) -> None:
        self.is_idle = False
        self._link.send(message)

    def receive(self, patience: float | None) -> Any:
        """Return the next message; raise ``TimeoutError``, or ``EOFError`` or ``OSError`` if the process died."""
        if not self._link.poll(patience):
            raise TimeoutError
        event = self._link.recv()
        self.is_idle = True
        return event

    def end(self) -> None:
        """End the process: an idle one may end by itself, one that loads or runs is killed."""
        if self.is_idle:
            self._link.close()
            self.process.join(LAST_SECONDS)
        self.process.kill()  # before its connection is closed, which another thread may read
        self.process.join(LAST_SECONDS)
        self._link.close()


class RemoteWorker:
    """A :class:`~dit_accel.serving.worker.Worker` in its own process; its errors are raised here.

    A step, and the time around them, may take ``patience`` seconds per sample. The latest ``most`` models stay loaded.
    """

    def __init__(
        self,
        setup: Setup,
        patience: float | None,
        start: Callable[[Setup], Any] = LocalProcess,
        attempts: int = 2,
        models: Mapping[str, Setup] = MappingProxyType({}),
        most: int = 1,
    ) -> None:
        self._setup, self._patience, self._start, self._attempts = setup, patience, start, attempts
        self.models, self._most = models, most
        self._resting: dict[str, tuple[Any, Loaded]] = {}  # processes of other models, the least recently used first
        self._is_stale = False  # True: models load again before their next jobs
        self._failed: dict[str, float] = {}  # until when models that can't be loaded are not tried again
        self._is_lost = False  # True: the pipeline could not be loaded again
        self._is_closed, self._changing = False, Lock()
        self._process = start(setup)

    def wait(self, patience: float | None = None) -> Loaded:
        try:
            self._loaded: Loaded = self._receive(patience)
            return self._loaded
        except EOFError:
            raise BatchError(f"the process that loads {self._setup.model} died; {self._process.log}") from None

    def choose(self, model: str) -> Loaded:
        """Load a model for the next jobs unless it is loaded; the least recently used leaves, and errors are logged."""
        failure = f"model {model} can't be loaded; the server's log has the reason"
        if not self._is_stale and time.monotonic() < self._failed.get(model, 0.0):
            raise DitAccelError(failure)
        if not self._is_lost:
            self._resting[self._setup.model] = self._process, self._loaded
        self._setup, self._is_lost = self.models[model], False
        most, self._is_stale = 0 if self._is_stale else self._most, False
        if most and self._setup.model in self._resting:
            self._process, self._loaded = self._resting.pop(self._setup.model)
            return self._loaded
        while self._resting and len(self._resting) >= most:
            self._resting.pop(next(iter(self._resting)))[0].end()
        try:
            with suppress(BatchError):  # the process died, perhaps killed by another program
                return self._with_room(self._load)
            return self._with_room(self._load)
        except Exception as error:
            self._is_lost = True
            logger.exception("%s can't be loaded", model)
            self._failed[model] = time.monotonic() + BETWEEN_LOADS
            raise DitAccelError(failure) from error

    def reload(self) -> None:
        """Let each model load again from its files before its next jobs; may be called in any thread."""
        self._is_stale = True

    def run(self, jobs: Sequence[Job], preset: Preset | None, suffix: str, tell: Callable[..., None]) -> list[Made]:
        """Run jobs as a :class:`~dit_accel.serving.worker.Worker`, again in a new process if the process dies.

        Each death ends the least recently used of the other models. Jobs that share a call have one attempt, for which
        no model leaves: they can run alone. Raise ``BatchError`` if the process hangs, dies in every attempt, or can't
        load the pipeline again (``LoadError``).
        """
        attempts, patience = 1 if len(jobs) > 1 else self._attempts, self._patience and len(jobs) * self._patience
        for attempt in range(1, attempts + 1):
            if attempt > 1 or self._is_lost:
                self.restart()
            try:
                run = partial(self._follow, (jobs, preset, suffix), tell, patience)
                return run() if len(jobs) > 1 else self._with_room(run)
            except TimeoutError:
                self._is_lost = True  # it may still answer, which would be taken for the next run's answer
                logger.error("the process of %s did not respond for %g s", self._setup.model, patience)
                raise BatchError(f"a step of the request took more than {patience:g} seconds") from None
            except OutputError:  # of a process that lives
                raise
            except (EOFError, OSError):
                logger.error("the process of %s died, attempt %d of %d", self._setup.model, attempt, attempts)
                if self._resting:  # there may have been no memory for the process's CUDA context
                    self._resting.pop(next(iter(self._resting)))[0].end()
        raise BatchError("the process that ran the request died")

    def restart(self) -> Loaded:
        """Kill the process, and load the pipeline in a new one; raise ``LoadError`` if that fails."""
        self._is_lost = True
        try:
            with self._changing:
                self._process.end()
            loaded = self._with_room(self._load)
        except Exception as error:
            if not self._is_closed:
                logger.exception("%s can't be loaded again", self._setup.model)
            raise LoadError("the pipeline can't be loaded again") from error
        self._is_lost = False
        return loaded

    def close(self) -> None:
        self._is_closed = True
        with self._changing:
            for process in (self._process, *(process for process, _ in [*self._resting.values()])):
                process.end()

    def _load(self) -> Loaded:
        with self._changing:
            if self._is_closed:
                raise BatchError("the server is shutting down")
            self._process = self._start(self._setup)
        try:
            return self.wait(LONGEST_LOAD)
        except Exception:
            with self._changing:
                self._process.end()
            raise

    def _with_room(self, work: Callable[[], Any]) -> Any:
        """Return a result; while memory is short, the least recently used of the other models leaves."""
        while True:
            try:
                return work()
            except (OutOfMemoryError, BatchError):  # also a process that died where memory was short
                if not self._resting:
                    raise
                self._resting.pop(next(iter(self._resting)))[0].end()

    def _follow(self, message: Any, tell: Callable[..., None], patience: float | None) -> list[Made]:
        self._process.send(message)
        while not isinstance(event := self._receive(patience), list):
            try:
                tell(*event)
            except Cancelled:
                self._process.send(False)
            else:
                self._process.send(True)
        return event

    def _receive(self, patience: float | None) -> Any:
        if isinstance(event := self._process.receive(patience), Exception):
            raise event
        return event


def serve_jobs(link: Connection, setup: Setup) -> None:
    silence_libraries()

    def tell(*step: Any) -> None:
        link.send(step)
        if not link.recv():
            raise Cancelled

    with link:
        try:
            worker = _outcome(partial(Worker, setup))
            link.send(worker.loaded if isinstance(worker, Worker) else worker)
            while isinstance(worker, Worker):
                link.send(_outcome(partial(worker.run, *link.recv(), tell)))
        except (EOFError, OSError):
            pass  # the server is gone


def _run(link: Connection, setup: Setup) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # which may be sent to all processes
        signal.signal(number, signal.SIG_IGN)
    serve_jobs(link, setup)


def _outcome(run: Callable[[], Any]) -> Any:
    """Return the result or the error; after an error of the GPU, which stays, the process ends."""
    try:
        return run()
    except (Cancelled, DitAccelError) as error:
        return error
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the server is gone
        raise
    except Exception as error:
        if "CUDA error" in str(error):
            os._exit(1)
        defect = DefectError(headline(error))
        defect.add_note(traceback.format_exc())
        return defect
