"""Engines that generate images and videos for many prompts; used by the commands.

    worker = Worker(Setup("demo-flux", preset="balanced", batch_size=2))
    made = worker.make([Job(0, {"prompt": "a red star", "seed": 0}), Job(1, {"prompt": "a blue box", "seed": 1})])

``worker`` is the :mod:`~dit_accel.serving.engine` of one process, ``ray_engine`` that of a Ray cluster, ``http`` the
server. ``dispatcher`` queues the jobs of the last two, and ``remote_worker`` runs them in processes or on Ray.
``prompts`` reads jobs and their contracts; ``pipelines`` opens and calls a pipeline.
"""

from dit_accel.serving.engine import Failure, Made
from dit_accel.serving.loading import Loading
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job, batches, read_jobs
from dit_accel.serving.worker import Worker

__all__ = ["Failure", "Job", "Loading", "Made", "Setup", "Worker", "batches", "read_jobs"]
