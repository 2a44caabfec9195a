"""Actors of a Ray cluster as processes of a worker: the promises of processes on this machine."""

import os
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest

from dit_accel.errors import BatchError, UnsupportedError
from dit_accel.presets import load_preset
from dit_accel.serving import ray_cluster, remote_worker
from dit_accel.serving.engine import Cancelled, DefectError, Loaded, Made, VideoForm
from dit_accel.serving.loading import Loading
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.remote_worker import RemoteWorker

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers don't import tests
NEEDS = {"num_cpus": 0, "num_gpus": 0}  # the cluster has two CPUs, and actors of several tests


class Simple:
    """Makes a file of its process's number; in the second of three steps does as the prompt says."""

    loaded = Loaded(VideoForm(16.0, 4), load_preset("balanced"), ".mp4", None)

    def __init__(self, setup):
        if setup.model == "missing":
            raise UnsupportedError("no such model")
        if setup.model == "broken":
            os._exit(1)

    def run(self, jobs, preset, suffix, tell):
        prompt = jobs[0].settings["prompt"]
        for step in range(3):
            tell(step + 1, 3, b"partial" if step == 0 else None)
            if step != 1:
                continue
            if prompt.startswith("die ") and not os.path.exists(file := prompt.removeprefix("die ")):
                os.close(os.open(file, os.O_CREAT))
                os._exit(1)
            if prompt == "hang":
                time.sleep(1000)
            if prompt == "gpu":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if prompt == "raise":
                raise RuntimeError("a defect")
        return [Made(str(os.getpid()).encode(), 0.5, None, [job.index for job in jobs])]


class Simply(ray_cluster._WorkerActor):
    def open(self, setup, folder):
        remote_worker.Worker = Simple
        return super().open(setup, folder)


@contextmanager
def started(model):
    """A worker whose actor loads the model on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_cluster, "_WorkerActor", Simply)
        worker = RemoteWorker(Setup(model, "none", loading=Loading("cpu")), 60.0, partial(ray_cluster.RayActor, NEEDS))
        try:
            yield worker
        finally:
            worker.close()


@pytest.fixture(scope="module")
def worker(cluster):
    with started("simple") as worker:
        assert worker.wait() == Simple.loaded
        yield worker


def process_of(worker, prompt="a fox", tell=lambda *_: None):
    """The number of the process that made a result."""
    (made,) = worker.run([Job(0, {"prompt": prompt})], None, ".png", tell)
    return int(made.data)


def test_an_actor_that_dies_costs_no_request(worker, tmp_path, caplog):
    """Its request runs again in a new actor."""
    before = process_of(worker)
    assert process_of(worker, f"die {tmp_path / 'died'}") != before and (tmp_path / "died").exists()
    assert "the process of simple died, attempt 1 of 2" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "error", "stays"),
    [
        ("gpu", BatchError("the process that ran the request died"), False),
        ("hang", BatchError("a step of the request took more than 0.5 seconds"), False),
        ("raise", DefectError("RuntimeError: a defect"), True),
    ],
)
def test_a_failed_request_gets_an_error_without_names_of_ray(worker, monkeypatch, prompt, error, stays):
    """After a restart a new actor runs the next request; if only the request failed, the same one does."""
    before = process_of(worker)
    with monkeypatch.context() as patch, pytest.raises(type(error), match=f"^{error}"):
        patch.setattr(worker, "_patience", 0.5 if prompt == "hang" else 60.0)
        process_of(worker, prompt)
    if not stays:
        worker.restart()
    assert (process_of(worker) == before) == stays


def test_a_cancelled_run_ends_between_two_steps(worker):
    """The same actor runs the next request."""
    before, steps = process_of(worker), []

    def leave(*step):
        steps.append(step)
        if len(steps) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        process_of(worker, tell=leave)
    assert steps == [(1, 3, b"partial"), (2, 3, None)] and process_of(worker) == before


def test_loading_errors_are_those_of_a_process(cluster):
    """An error of the pipeline has its type and message; a process that dies is named."""
    with started("missing") as missing, started("broken") as broken:
        with pytest.raises(UnsupportedError, match=r"^no such model$"):
            missing.wait()
        with pytest.raises(BatchError, match="the process that loads broken died; Ray's logs have the reason"):
            broken.wait()


def test_a_closed_worker_leaves_no_actor(worker):
    """A closed worker starts none either. The last test of this worker."""
    process = process_of(worker)
    worker.close()
    with pytest.raises(BatchError, match="can't be loaded again"):
        worker.restart()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
