"""A worker in a process of its own, one for each GPU of a server; a new process replaces one that dies.

The process receives ``(job, preset, suffix)`` and sends ``(finished steps, all steps)`` after each step, which the
server answers with True, or False to end the run. Then it sends the :class:`Made`, or the error.
"""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from dit_accel.errors import BatchError, DitAccelError
from dit_accel.serving.dispatcher import Cancelled
from dit_accel.serving.engine import Made
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker

logger = logging.getLogger(__name__)

ATTEMPTS = 2  # for each job
LAST_SECONDS = 2.0  # that an idle process has to end

if TYPE_CHECKING:
    from dit_accel.presets import Preset


class RemoteWorker:
    """A :class:`Worker` in its own process; its errors are raised here."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._is_closed = setup, False
        self._start()

    def wait(self) -> tuple[str, Preset | None]:
        """Wait until the pipeline is loaded; return the suffix of its files and its preset.

        Raises:
            BatchError: the process died.
        """
        try:
            return self._receive()
        except EOFError:
            raise BatchError(f"the process that loads {self._setup.model} died; its log is above") from None

    def make_one(self, job: Job, preset: Preset | None, suffix: str, tell: Callable[[int, int], None]) -> Made:
        """Run a job; see :meth:`Worker.make_one`. If the process dies, the job runs again in a new process.

        Raises:
            BatchError: the process died in every attempt, or can't load the pipeline again.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._link.send((job, preset, suffix))
                return self._follow(tell)
            except (EOFError, OSError):
                logger.error("the process of %s died, attempt %d of %d", self._setup.model, attempt, ATTEMPTS)
            if self._is_closed:
                break
            self._end()
            self._start()
            try:
                self.wait()
            except Exception as error:
                logger.exception("%s can't be loaded again", self._setup.model)
                raise BatchError("the pipeline can't be loaded again") from error
        raise BatchError("the process that ran the request died")

    def close(self) -> None:
        """End the process, which is idle, loads or does not respond."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        self._link.close()
        self._process.join(LAST_SECONDS)
        self._process.kill()

    def _start(self) -> None:
        context = get_context("spawn")  # a forked process can't use CUDA
        self._link, link = context.Pipe()
        self._process = context.Process(target=_run, args=(link, self._setup), daemon=True)
        self._process.start()
        link.close()

    def _follow(self, tell: Callable[[int, int], None]) -> Made:
        """Answer the steps of a run until it ends."""
        while not isinstance(event := self._receive(), Made):
            try:
                tell(*event)
            except Cancelled:
                self._link.send(False)
            else:
                self._link.send(True)
        return event

    def _receive(self) -> Any:
        event = self._link.recv()
        if isinstance(event, Exception):
            raise event
        return event


def _run(link: Connection, setup: Setup) -> None:
    """Load the pipeline and run jobs until the server closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the terminal and service managers send them to all processes
        signal.signal(number, signal.SIG_IGN)

    def tell(done: int, steps: int) -> None:
        link.send((done, steps))
        if not link.recv():
            raise Cancelled

    try:
        worker = _opened(link, setup)
        while worker is not None:
            job, preset, suffix = link.recv()
            link.send(_outcome(partial(worker.make_one, job, preset, suffix, tell)))
    except (EOFError, OSError):
        pass  # the server is gone


def _opened(link: Connection, setup: Setup) -> Worker | None:
    import torch

    if (setup.loading.device or "").startswith("cuda:"):
        torch.cuda.set_device(setup.loading.device)  # where Triton launches kernels
    worker = _outcome(partial(Worker, setup))
    is_open = isinstance(worker, Worker)
    link.send((worker.suffix, worker.preset_in_use) if is_open else worker)
    return worker if is_open else None


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
        return RuntimeError(traceback.format_exc())
