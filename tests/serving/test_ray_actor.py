"""``serve --engine ray``: the server's promises, with actors of a Ray cluster as its processes."""

import asyncio
import base64
import io
import os
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest
from PIL import Image

from dit_accel.errors import BatchError, UnsupportedError
from dit_accel.presets import load_preset
from dit_accel.serving import ray_actor, worker_process
from dit_accel.serving.engine import Loaded, Made, VideoForm
from dit_accel.serving.http.api import Limits
from dit_accel.serving.loading import Loading
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job

ray = pytest.importorskip("ray")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
dispatching = pytest.importorskip("dit_accel.serving.dispatcher")
remote = pytest.importorskip("dit_accel.serving.remote_worker")
server = pytest.importorskip("dit_accel.serving.http.server")

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers don't import tests
PATH = "/v1/images/generations"
GOOD = {"prompt": "a fox", "size": "32x32", "steps": 3, "seed": 3}
NEEDS = {"num_cpus": 0, "num_gpus": 0}  # the cluster has two CPUs, and actors of several tests


class Simple:
    """Makes an image in the colour of its process's number; in the second step does as the prompt says."""

    loaded = Loaded(VideoForm(16.0, 4), load_preset("balanced"), ".mp4", None)

    def __init__(self, setup):
        if setup.model == "missing":
            raise UnsupportedError("no such model")
        if setup.model == "broken":
            os._exit(1)

    def run(self, jobs, preset, suffix, tell):
        (job,) = jobs
        prompt = job.settings["prompt"]
        for step in range(job.settings["steps"]):
            tell(step + 1, job.settings["steps"], b"partial" if step == 0 else None)
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
        file = io.BytesIO()
        Image.new("RGB", (16, 16), (*os.getpid().to_bytes(3),)).save(file, "png")
        return [Made(file.getvalue(), 0.5, None, [job.index], {"denoising": 0.5})]


class Simply(ray_actor._WorkerActor):
    def open(self, setup, folder):
        worker_process.Worker = Simple
        return super().open(setup, folder)


def start(model, patience=60.0):
    """A worker whose actor loads the model on a CPU."""
    setup = Setup(str(model), "none", loading=Loading("cpu"))
    return remote.RemoteWorker(setup, patience, partial(ray_actor.RayActor, NEEDS))


@contextmanager
def closing(workers):
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


@pytest.fixture(scope="module")
def simple(cluster):
    """Two workers whose actors load nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_actor, "_WorkerActor", Simply)
        with closing([start("simple") for _ in range(2)]) as workers:
            assert [worker.wait() for worker in workers] == [Simple.loaded] * 2
            yield workers


@contextmanager
def serving(workers):
    """An application, whose workers are healthy at its end."""
    dispatcher = dispatching.Dispatcher(workers, 8)
    limits = Limits(side=64, steps=1000, images=2, body=4096, seconds=60.0, upload=4096)
    try:
        yield server.build_app(dispatcher, server.Served("tiny", None, limits), (), ())
    finally:
        dispatcher.stop(10.0)
        assert dispatcher.failure is None


def ask(app, *bodies):
    """The answers to requests that are sent at once."""

    async def post():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=60) as http:
            return await asyncio.gather(*(http.post(PATH, json=GOOD | body) for body in bodies))

    return asyncio.run(post())


def made(answer):
    (entry,) = answer.json()["data"]
    return base64.b64decode(entry["b64_json"])


def process_of(answer):
    """The number of the process that made an image."""
    return int.from_bytes(Image.open(io.BytesIO(made(answer))).getpixel((0, 0)))


def test_an_actor_that_dies_costs_no_request(simple, tmp_path, caplog):
    """Its request runs again in a new actor, while the other actor runs another request."""
    with serving(simple) as app:
        answers = ask(app, {"prompt": f"die {tmp_path / 'died'}"}, {})
    assert [answer.status_code for answer in answers] == [200, 200] and (tmp_path / "died").exists()
    assert len({process_of(answer) for answer in answers}) == 2
    assert "the process of simple died, attempt 1 of 2" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "message", "stays"),
    [
        ("gpu", "the process that ran the request died", False),
        ("hang", "a step of the request took more than 0.5 seconds", False),
        ("raise", "the request failed; the server's log has the reason", True),
    ],
)
def test_a_failed_request_gets_an_error_without_names_of_ray(simple, monkeypatch, prompt, message, stays):
    """A broken actor is replaced; if only the request failed, its actor runs the next one."""
    (worker, _) = simple
    with serving([worker]) as app:
        (before,) = ask(app, {})
        with monkeypatch.context() as patch:
            patch.setattr(worker, "_patience", 0.5 if prompt == "hang" else 60.0)
            (failed,) = ask(app, {"prompt": prompt})
        (after,) = ask(app, {})
    assert failed.status_code == 500 and failed.json()["error"]["message"] == message
    assert (process_of(before) == process_of(after)) == stays


def test_a_cancelled_run_ends_between_two_steps(simple):
    """The same actor runs the next request."""
    worker, _ = simple
    steps = []

    def leave(*step):
        steps.append(step)
        if len(steps) == 2:
            raise dispatching.Cancelled

    with serving([worker]) as app:
        (before,) = ask(app, {})
        with pytest.raises(dispatching.Cancelled):
            worker.run([Job(0, {"prompt": "a fox", "steps": 1000})], None, ".png", leave)
        (after,) = ask(app, {})
    assert steps == [(1, 1000, b"partial"), (2, 1000, None)]
    assert process_of(before) == process_of(after)


def test_loading_errors_are_those_of_a_process(cluster, monkeypatch):
    """An error of the pipeline has its type and message; a process that dies is named."""
    monkeypatch.setattr(ray_actor, "_WorkerActor", Simply)
    with closing([start("missing"), start("broken")]) as (missing, broken):
        with pytest.raises(UnsupportedError, match=r"^no such model$"):
            missing.wait()
        with pytest.raises(BatchError, match="the process that loads broken died; Ray's logs have the reason"):
            broken.wait()


def test_a_closed_worker_leaves_no_actor(simple):
    """A closed worker starts none either. The last test of these workers."""
    with serving(simple) as app:
        running = {process_of(answer) for answer in ask(app, {}, {})}
    for worker in simple:
        worker.close()
        with pytest.raises(BatchError, match="can't be loaded again"):
            worker.restart()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{process}") for process in running):
        assert time.monotonic() < deadline
        time.sleep(0.05)
