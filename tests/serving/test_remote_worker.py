"""Processes of workers that hang or die: the request gets an error, and a new process makes the next image."""

import asyncio
import os
import signal

import pytest

from dit_accel.serving.engine import Cancelled, Loaded, Made
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from tests.forked import fork_server
from tests.tiny import tiny_pipeline

pytest.importorskip("fastapi")
dispatching = pytest.importorskip("dit_accel.serving.dispatcher")
remote = pytest.importorskip("dit_accel.serving.remote_worker")

JOB = Job(0, {"prompt": "a fox", "steps": 3, "height": 32, "width": 32, "seed": 1})


@pytest.fixture(scope="module")
def processes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "get_context", lambda _: fork_server())
        yield


@pytest.fixture(scope="module")
def worker(processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "flux"
    tiny_pipeline("flux").save_pretrained(folder)
    worker = remote.RemoteWorker(Setup(str(folder), "none"), 60.0)
    try:
        worker.wait()
        yield worker
    finally:
        worker.close()
        assert not worker._process.process.is_alive()


class Struck:
    """A worker whose process gets a signal in each step; the steps of a stopped one then take too long."""

    def __init__(self, worker, number, monkeypatch):
        self.restart, self._worker, self._number, self._monkeypatch = worker.restart, worker, number, monkeypatch
        self.struck = []

    def run(self, jobs, preset, suffix, tell):
        def strike(done, steps):
            tell(done, steps)
            self.struck.append(self._worker._process.process)
            os.kill(self.struck[-1].pid, self._number)
            if self._number == signal.SIGSTOP:
                self._monkeypatch.setattr(self._worker, "_patience", 0.2)

        return self._worker.run(jobs, preset, suffix, strike)


@pytest.mark.parametrize(
    ("number", "attempts", "message"),
    [
        (signal.SIGSTOP, 1, "a step of the request took more than 0.2 seconds"),
        (signal.SIGKILL, 2, "the process that ran the request died"),
    ],
    ids=["hangs", "dies"],
)
def test_a_process_that_hangs_or_dies_is_replaced(worker, monkeypatch, number, attempts, message):
    """The request gets the error at once; the old processes are gone, and the server is healthy once more."""
    struck = Struck(worker, number, monkeypatch)
    dispatcher = dispatching.Dispatcher([struck], 1)

    async def ask():
        task = dispatching.AwaitedTask([JOB], None, ".png")
        dispatcher.add(task)
        with pytest.raises(dispatching.BatchError, match=message):
            async for _ in task:
                pass
        monkeypatch.undo()
        async with asyncio.timeout(120):
            while worker._process.process in struck.struck or not worker._process.is_idle:
                await asyncio.sleep(0.05)

    asyncio.run(ask())
    dispatcher.stop(10.0)
    assert dispatcher.failure is None
    assert len(struck.struck) == attempts and not any(process.is_alive() for process in struck.struck)
    (made,) = worker.run([JOB], None, ".png", lambda done, steps: None)
    assert made.data.startswith(b"\x89PNG")


def test_a_process_that_loads_is_ended_at_once(worker):
    """Its server need not wait for the weights, and a closed worker starts no process."""
    loading = remote.RemoteWorker(worker._setup, 60.0)
    loading.close()
    assert not loading._process.process.is_alive()
    with pytest.raises(remote.BatchError, match="can't be loaded again"):
        loading.restart()
    assert not loading._process.process.is_alive()


def test_a_process_that_takes_too_long_to_load_again_is_an_error(worker, monkeypatch):
    """The last test of this worker."""
    monkeypatch.setattr(remote, "LONGEST_LOAD", 0.01)
    with pytest.raises(remote.BatchError, match="can't be loaded again"):
        worker.restart()
    assert not worker._process.process.is_alive()


class Scripted:
    """A process that sends these messages, and raises those that are errors of a connection."""

    log = "its log is above"

    def __init__(self, *messages):
        self.messages, self.sent, self.ends = [*messages], [], 0

    def send(self, message):
        self.sent.append(message)

    def receive(self, patience):
        message = self.messages.pop(0)
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
        ([EOFError()], [TimeoutError()], "the pipeline can't be loaded again"),
        ([(1, 2), TimeoutError()], None, "took more than 7 seconds"),
    ],
    ids=["well", "dies", "dies again", "cannot load", "loads for ever", "hangs"],
)
def test_a_job_has_two_attempts(first, second, end):
    """The second in a new process, which ends too if it can't load; a job that hangs has one."""
    processes, steps = [Scripted(*first), *([Scripted(*second)] if second else [])], []
    worker = scripted(*processes)
    try:
        assert worker.run([JOB], None, ".png", lambda *step: steps.append(step)) is MADE and end is None
    except remote.BatchError as error:
        assert end is not None and end in str(error)
    assert steps == [each for each in (*first, *(second or [])) if isinstance(each, tuple)]
    assert len(processes[0].sent) == 1 + sum(isinstance(each, tuple) for each in first)
    assert [process.ends for process in processes[:-1]] == [1] * (len(processes) - 1)
    assert processes[-1].ends == (end == "the pipeline can't be loaded again")
    worker.close()
    assert processes[-1].ends == 1 + (end == "the pipeline can't be loaded again")


def test_a_cancelled_job_is_answered_until_its_process_ends_it():
    """Otherwise the process would wait for an answer, and the next job would get the old one's messages."""
    process = Scripted((1, 3), (2, 3), Cancelled(), (1, 3), MADE)
    worker = scripted(process)

    def tell(done, steps):
        if done == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        worker.run([JOB], None, ".png", tell)
    assert worker.run([JOB], None, ".png", tell) is MADE and process.ends == 0
    assert process.sent == [([JOB], None, ".png"), True, False, ([JOB], None, ".png"), True]
