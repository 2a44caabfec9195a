"""A process of a Ray cluster that loads a pipeline and runs jobs.

Its messages are those of :mod:`~dit_accel.serving.worker_process`. The process sends one only as the answer to one of
the server's, so each is the result of a call of the actor. The pipeline runs in a thread of the actor.
"""

from __future__ import annotations

import logging
import os
from multiprocessing import Pipe
from threading import Thread
from typing import Any

from dit_accel.serving.engine import reason_of
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.worker_process import serve_jobs

logger = logging.getLogger(__name__)


class RayActor:
    """A :class:`~dit_accel.serving.remote_worker.WorkerProcess` of a Ray cluster.

    Args:
        needs: resources of the actor, as ``ray.remote`` takes them.
    """

    log = "Ray's logs have the reason"

    def __init__(self, needs: dict[str, int], setup: Setup) -> None:
        import ray

        self._actor = ray.remote(**needs)(_WorkerActor).remote()
        self._message = self._actor.open.remote(setup, os.getcwd())  # future of the next one

    def send(self, message: Any) -> None:
        self._message = self._actor.exchange.remote(message)

    def receive(self, patience: float | None) -> Any:
        import ray
        from ray.exceptions import RayError

        if not ray.wait([self._message], timeout=patience)[0]:
            raise TimeoutError
        try:
            return ray.get(self._message)
        except RayError as error:
            logger.error(reason_of(error))
            raise EOFError from None

    def end(self) -> None:
        import ray

        ray.kill(self._actor)


class _WorkerActor:
    """Jobs of :func:`serve_jobs`, with a method call for each message."""

    def open(self, setup: Setup, folder: str) -> Any:
        """Load the pipeline in the command's folder if it exists here, so that paths mean the same.

        Return the first message.
        """
        if os.path.isdir(folder):
            os.chdir(folder)
        self._link, link = Pipe()
        Thread(target=serve_jobs, args=(link, setup), daemon=True).start()
        return self._link.recv()

    def exchange(self, message: Any) -> Any:
        """Send a message; return the next one."""
        self._link.send(message)
        return self._link.recv()
