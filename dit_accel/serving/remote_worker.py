"""A worker in a process of its own, one for each GPU of a server; a new process replaces one that dies or hangs.

The process receives ``(job, preset, suffix)``. After each step it sends ``(finished steps, all steps)``, and the file
of a partial image if there is one; the server answers with True, or False to end the run. At the end the process sends
the :class:`Made`, or the error.
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
from threading import Lock
from typing import TYPE_CHECKING, Any

from dit_accel.errors import BatchError, DitAccelError
from dit_accel.serving.dispatcher import Cancelled
from dit_accel.serving.engine import Made, VideoForm
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.processes import silence_libraries
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker

logger = logging.getLogger(__name__)

ATTEMPTS = 2  # for each job
LAST_SECONDS = 2.0  # that an idle process has to end, or a killed one
LONGEST_LOAD = 1800.0  # seconds that a new process has to load the pipeline again

if TYPE_CHECKING:
    from dit_accel.presets import Preset


class RemoteWorker:
    """A :class:`Worker` in its own process; its errors are raised here.

    Args:
        patience: most seconds of a step, of the time before the first one, and of the time after the last one.
    """

    def __init__(self, setup: Setup, patience: float) -> None:
        self._setup, self._patience = setup, patience
        self._is_closed, self._changing = False, Lock()
        self._start()

    def wait(self, patience: float | None = None) -> tuple[VideoForm | None, Preset | None]:
        """Wait until the pipeline is loaded; return the form of its videos, None for images, and its preset.

        Args:
            patience: most seconds; None = no limit.

        Raises:
            BatchError: the process died.
            TimeoutError: it takes longer.
        """
        try:
            return self._receive(patience)
        except EOFError:
            raise BatchError(f"the process that loads {self._setup.model} died; its log is above") from None

    def make_one(self, job: Job, preset: Preset | None, suffix: str, tell: Callable[..., None]) -> Made:
        """Run a job; see :meth:`Worker.make_one`. If the process dies, the job runs again in a new process.

        Raises:
            BatchError: the process hangs, died in every attempt, or can't load the pipeline again.
        """
        for attempt in range(1, ATTEMPTS + 1):
            if attempt > 1:
                self.restart()
            try:
                self._send((job, preset, suffix))
                return self._follow(tell)
            except TimeoutError:
                logger.error("the process of %s did not respond for %g s", self._setup.model, self._patience)
                raise BatchError(f"a step of the request took more than {self._patience:g} seconds") from None
            except (EOFError, OSError):
                logger.error("the process of %s died, attempt %d of %d", self._setup.model, attempt, ATTEMPTS)
        raise BatchError("the process that ran the request died")

    def restart(self) -> None:
        """Kill the process, and load the pipeline in a new one.

        Raises:
            BatchError: the pipeline can't be loaded again, or the worker is closed.
        """
        try:
            with self._changing:
                self._end()
                if self._is_closed:
                    raise BatchError("the server is shutting down")
                self._start()
            self.wait(LONGEST_LOAD)
        except Exception as error:
            if not self._is_closed:
                logger.exception("%s can't be loaded again", self._setup.model)
            with self._changing:
                self._end()
            raise BatchError("the pipeline can't be loaded again") from error

    def close(self) -> None:
        """End the process: an idle one may end by itself, one that loads or runs is killed."""
        self._is_closed = True
        with self._changing:
            self._end()

    def _end(self) -> None:
        if self._is_idle:
            self._link.close()
            self._process.join(LAST_SECONDS)
        self._process.kill()  # before its connection is closed, which another thread may read
        self._process.join(LAST_SECONDS)
        self._link.close()

    def _start(self) -> None:
        context = get_context("spawn")  # a forked process can't use CUDA
        own, link = context.Pipe()
        process = context.Process(target=_run, args=(link, self._setup), daemon=True)
        process.start()
        link.close()
        self._link, self._process = own, process
        self._is_idle = False  # True while the process waits for a message

    def _follow(self, tell: Callable[..., None]) -> Made:
        """Answer the steps of a run until it ends."""
        while not isinstance(event := self._receive(self._patience), Made):
            try:
                tell(*event)
            except Cancelled:
                self._send(False)
            else:
                self._send(True)
        return event

    def _send(self, message: Any) -> None:
        self._is_idle = False
        self._link.send(message)

    def _receive(self, patience: float | None) -> Any:
        if not self._link.poll(patience):
            raise TimeoutError
        event = self._link.recv()
        self._is_idle = True
        if isinstance(event, Exception):
            raise event
        return event


def _run(link: Connection, setup: Setup) -> None:
    """Load the pipeline and run jobs until the server closes the connection."""
    silence_libraries()
    for number in (signal.SIGINT, signal.SIGTERM):  # the terminal and service managers send them to all processes
        signal.signal(number, signal.SIG_IGN)

    def tell(*step: Any) -> None:
        link.send(step)
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
    link.send((worker.video_form, worker.preset_in_use) if is_open else worker)
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
