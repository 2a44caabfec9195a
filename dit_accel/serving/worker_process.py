"""A process of this machine that loads a pipeline and runs jobs.

It first sends :class:`Loaded`, or the error. Then it receives ``(jobs, preset, suffix)``. After each step it sends
``(finished steps, all steps)``, and the file of a partial image if there is one; the server answers with True, or False
to end the run. At the end the process sends a list of :class:`Made`, or the error.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from dit_accel.errors import DitAccelError, headline
from dit_accel.serving.dispatcher import Cancelled
from dit_accel.serving.engine import DefectError
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.processes import silence_libraries
from dit_accel.serving.worker import Worker

LAST_SECONDS = 2.0  # that an idle process has to end, or a killed one


class LocalProcess:
    """A :class:`~dit_accel.serving.remote_worker.WorkerProcess` of this machine."""

    log = "its log is above"

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


def serve_jobs(link: Connection, setup: Setup) -> None:
    """Load the pipeline and run jobs until the server closes the connection."""
    silence_libraries()

    def tell(*step: Any) -> None:
        link.send(step)
        if not link.recv():
            raise Cancelled

    with link:
        try:
            worker = _opened(link, setup)
            while worker is not None:
                link.send(_outcome(partial(worker.run, *link.recv(), tell)))
        except (EOFError, OSError):
            pass  # the server is gone


def _run(link: Connection, setup: Setup) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the terminal and service managers send them to all processes
        signal.signal(number, signal.SIG_IGN)
    serve_jobs(link, setup)


def _opened(link: Connection, setup: Setup) -> Worker | None:
    if (setup.loading.device or "").startswith("cuda:"):
        import torch

        torch.cuda.set_device(setup.loading.device)  # where Triton launches kernels
    worker = _outcome(partial(Worker, setup))
    is_open = isinstance(worker, Worker)
    link.send(worker.loaded if is_open else worker)
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
        defect = DefectError(headline(error))
        defect.add_note(traceback.format_exc())
        return defect
