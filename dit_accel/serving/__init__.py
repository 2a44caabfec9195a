"""Engines that generate images and videos for many prompts; used by the commands.

    setup = Setup("demo-flux", preset="balanced", batch_size=2)
    worker = Worker(setup)
    made = worker.make([Job(0, {"prompt": "a red star", "seed": 0}), Job(1, {"prompt": "a blue box", "seed": 1})])

Read :mod:`~dit_accel.serving.engine` first. ``worker`` is the engine of one process and ``ray_engine`` the engine of a
Ray cluster. ``prompts`` reads jobs from files; ``pipelines`` opens and calls a pipeline, with ``loading``, ``loras``
and ``media``.

:mod:`~dit_accel.serving.http` is the server of ``dit-accel serve``. ``dispatcher`` queues its requests, and the jobs of
``ray_engine``; ``remote_worker`` runs them in processes or on a Ray cluster (``ray_cluster``).
"""

from dit_accel.serving.engine import Failure, Made
from dit_accel.serving.loading import Loading
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job, batches, read_jobs
from dit_accel.serving.worker import Worker

__all__ = ["Failure", "Job", "Loading", "Made", "Setup", "Worker", "batches", "read_jobs"]
