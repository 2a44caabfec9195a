"""The Ray cluster of a command, and its actors, which are processes of a :class:`RemoteWorker`."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from threading import Thread
from typing import Any

from rich.console import Console

from dit_accel.errors import ArgumentError, shortened
from dit_accel.serving.engine import reason_of
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.remote_worker import serve_jobs

logger = logging.getLogger(__name__)


@contextmanager
def joined_cluster(setup: Setup, actors: int | None, console: Console) -> Iterator[tuple[Setup, int, dict[str, int]]]:
    """Join or start a cluster; yield the setup of its actors, their number, and the resources that each needs."""
    import ray

    if ours := not ray.is_initialized():
        connect(console)
    try:
        device, count = places(ray.cluster_resources(), setup.loading.device, actors)
        needs = {"num_cpus": 1, "num_gpus": int(device == "cuda")}
        yield replace(setup, loading=replace(setup.loading, device=device)), count, needs
    finally:
        if ours:
            ray.shutdown()


def connect(console: Console) -> None:
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry from a cluster started here
    with console.status("connecting to Ray"):
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if port.isdecimal():  # Ray itself would retry for many minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            where = f"RAY_ADDRESS={address}" if address else "this machine"
            raise ArgumentError("engine", f"no Ray cluster at {where}: {shortened(str(error))}") from None


def places(resources: dict[str, float], device: str | None, actors: int | None) -> tuple[str, int]:
    gpus, cpus = (int(resources.get(kind, 0)) for kind in ("GPU", "CPU"))
    if device == "cuda" and not gpus:
        raise ArgumentError("device", "is cuda, but the Ray cluster has no GPU")
    on_gpus = gpus > 0 and device != "cpu"
    if actors is None and not on_gpus:
        raise ArgumentError("actors", f"must be given: each actor takes one of the Ray cluster's {cpus} CPUs")
    most, kind = (gpus, "GPU") if on_gpus else (cpus, "CPU")
    if actors is not None and actors > most:
        raise ArgumentError("actors", f"can't be {actors}: each actor takes a {kind}, and the Ray cluster has {most}")
    return ("cuda" if on_gpus else "cpu"), actors or most


class RayActor:
    """A process of a Ray cluster, with the methods of a :class:`LocalProcess`; its messages are results of calls."""

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
    def open(self, setup: Setup, folder: str) -> Any:
        """Load the pipeline in the command's folder, if it is here, and return the first message."""
        if os.path.isdir(folder):
            os.chdir(folder)
        self._link, link = Pipe()
        Thread(target=serve_jobs, args=(link, setup), daemon=True).start()
        return self._link.recv()

    def exchange(self, message: Any) -> Any:
        self._link.send(message)
        return self._link.recv()
