"""Workers in processes of this machine and of a Ray cluster, which die, hang, fail or are cancelled."""

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context

import pytest

from dit_accel.errors import ArgumentError, BatchError, DitAccelError, OutOfMemoryError, OutputError
from dit_accel.presets import load_preset
from dit_accel.serving import ray_cluster
from dit_accel.serving import remote_worker as remote
from dit_accel.serving.engine import Cancelled, DefectError, Loaded, Made, VideoForm
from dit_accel.serving.loading import Loading
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from tests.forked import until

JOB = Job(0, {"prompt": "a fox"})
NEEDS = {"num_cpus": 0, "num_gpus": 0}  # the cluster has two CPUs, and actors of several tests


class Simple:
    """Makes a file of its process's number; in the second of three steps does as the prompt says."""

    loaded = Loaded(VideoForm(16.0, 4), load_preset("balanced"), ".mp4", None)

    def __init__(self, setup):
        if setup.model == "missing":
            raise ArgumentError("model", "is not there")
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
            if prompt == "full":
                raise OutputError("the disk is full")
            if prompt == "raise":
                raise RuntimeError("a defect")
        return [Made(str(os.getpid()).encode(), 0.5, None, [job.index for job in jobs])]


class Simply(ray_cluster._WorkerActor):
    def open(self, setup, folder):
        remote.Worker = Simple
        return super().open(setup, folder)


@pytest.fixture(scope="module", params=["local", "ray"])
def started(request):
    with pytest.MonkeyPatch.context() as patch, ExitStack() as closing:
        if request.param == "ray":
            ray = pytest.importorskip("ray")
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers don't import tests
            request.getfixturevalue("cluster")
            patch.setattr(ray_cluster, "_WorkerActor", Simply)
            start = partial(ray_cluster.RayActor, NEEDS)
        else:
            patch.setattr(remote, "Worker", Simple)
            patch.setattr(remote, "get_context", lambda _: get_context("fork"))
            start = remote.LocalProcess

        def start_worker(model):
            worker = remote.RemoteWorker(Setup(model, "none", loading=Loading("cpu")), 60.0, start)
            closing.callback(worker.close)
            return worker

        yield start_worker


@pytest.fixture(scope="module")
def worker(started):
    worker = started("simple")
    assert worker.wait() == Simple.loaded
    return worker


def process_of(worker, prompt="a fox", tell=lambda *_: None):
    (made,) = worker.run([Job(0, {"prompt": prompt})], None, ".png", tell)
    return int(made.data)


def test_a_process_that_dies_costs_no_request(worker, tmp_path, caplog):
    """Its request runs again in a new process."""
    before = process_of(worker)
    assert process_of(worker, f"die {tmp_path / 'died'}") != before and (tmp_path / "died").exists()
    assert "the process of simple died, attempt 1 of 2" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "error", "stays"),
    [
        ("gpu", BatchError("the process that ran the request died"), False),
        ("hang", BatchError("a step of the request took more than 0.5 seconds"), False),
        ("raise", DefectError("RuntimeError: a defect"), True),
        ("full", OutputError("the disk is full"), True),
    ],
)
def test_a_failed_request_gets_an_error_without_names_of_ray(worker, monkeypatch, prompt, error, stays):
    """A new process runs the next request; if only the request failed, the same one does."""
    before = process_of(worker)
    with monkeypatch.context() as patch, pytest.raises(type(error), match=f"^{error}"):
        patch.setattr(worker, "_patience", 0.5 if prompt == "hang" else 60.0)
        process_of(worker, prompt)
    assert (process_of(worker) == before) == stays


def test_a_cancelled_run_ends_between_two_steps(worker):
    """The same process runs the next request."""
    before, steps = process_of(worker), []

    def leave(*step):
        steps.append(step)
        if len(steps) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        process_of(worker, tell=leave)
    assert steps == [(1, 3, b"partial"), (2, 3, None)] and process_of(worker) == before


def test_loading_errors_are_raised(started):
    """An error of the pipeline has its type and message; a process that dies is named."""
    with pytest.raises(ArgumentError, match=r"^model: is not there$"):
        started("missing").wait()
    broken = started("broken")
    with pytest.raises(BatchError, match=f"the process that loads broken died; {broken._process.log}"):
        broken.wait()


def test_a_closed_worker_leaves_no_process(worker):
    """A closed worker starts none either. The last test of this worker."""
    process = process_of(worker)
    worker.close()
    with pytest.raises(BatchError, match="can't be loaded again"):
        worker.restart()
    until(lambda: not os.path.exists(f"/proc/{process}"))


class Scripted:
    """A process that sends these messages, and raises those that are errors of a connection."""

    log = "its log is above"

    def __init__(self, *messages):
        self.messages, self.sent, self.ends = [*messages], [], 0

    def send(self, message):
        self.sent.append(message)

    def receive(self, patience):
        self.patience, message = patience, self.messages.pop(0)
        if isinstance(message, (EOFError, OSError)):  # also TimeoutError
            raise message
        return message

    def end(self):
        self.ends += 1


LOADED, MADE = Loaded(None, None, ".png", None), [Made(b"", 0.5, None, [0])]


def scripted(*processes):
    left = [*processes]
    return remote.RemoteWorker(Setup("some/model"), 7.0, lambda setup: left.pop(0))


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        ([(1, 2), (2, 2), MADE], None, None),
        ([(1, 2), EOFError()], [LOADED, (1, 2), MADE], None),
        ([(1, 2), EOFError()], [LOADED, BrokenPipeError()], "the process that ran the request died"),
        ([EOFError()], [EOFError()], "the pipeline can't be loaded again"),
        ([(1, 2), TimeoutError()], None, "took more than 7 seconds"),
    ],
    ids=["well", "dies", "dies again", "cannot load", "hangs"],
)
def test_a_job_has_two_attempts(first, second, end):
    """The second in a new process, which ends too if it can't load; a job that hangs has one."""
    processes, steps = [Scripted(*first), *([Scripted(*second)] if second else [])], []
    worker = scripted(*processes)
    try:
        assert worker.run([JOB], None, ".png", lambda *step: steps.append(step)) is MADE and end is None
    except BatchError as error:
        assert end is not None and end in str(error)
    assert steps == [each for each in (*first, *(second or [])) if isinstance(each, tuple)]
    assert len(processes[0].sent) == 1 + sum(isinstance(each, tuple) for each in first)
    assert [process.ends for process in processes[:-1]] == [1] * (len(processes) - 1)
    assert processes[-1].ends == (end == "the pipeline can't be loaded again")
    worker.close()
    assert processes[-1].ends == 1 + (end == "the pipeline can't be loaded again")


@pytest.mark.parametrize(
    ("error", "end"),
    [(EOFError(), "died"), (OutOfMemoryError("no memory"), "no memory"), (TimeoutError(), "more than 14 seconds")],
    ids=["dies", "lacks memory", "hangs"],
)
def test_jobs_that_share_a_call_have_one_attempt(error, end):
    """They can run alone, so no other model leaves for lack of memory; a step may take as long as theirs one by one."""
    worker = scripted(process := Scripted(error))
    worker._resting["other"] = other, _ = Scripted(), LOADED
    with pytest.raises(DitAccelError, match=end):
        worker.run([JOB, JOB], None, ".png", lambda *_: None)
    assert other.ends == isinstance(error, EOFError) and process.patience == 14.0
