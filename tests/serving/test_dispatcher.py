"""The queue of a server: its bound, its estimate of a wait, and workers that break, without a server or a pipeline."""

import threading
import time
from types import SimpleNamespace

import pytest

from dit_accel.errors import BatchError
from dit_accel.serving import dispatcher as dispatching
from dit_accel.serving.deadlines import Busy
from dit_accel.serving.dispatcher import Cancelled, Dispatcher, Task
from dit_accel.serving.engine import Made
from dit_accel.serving.prompts import Job
from tests.forked import until


class Noted(Task):
    """A task that notes its events; ``ended`` is set with the last one."""

    def __init__(self, *work):
        super().__init__([Job(index, {"work": each}) for index, each in enumerate(work)], None, ".png")
        self.events, self.ended, self.begun = [], threading.Event(), threading.Event()

    def begin(self, samples):
        self.begun.set()

    def tell(self, event):
        self.events.append(event.data if isinstance(event, Made) else event)
        if event is None or isinstance(event, BaseException):
            self.ended.set()


class Hands:
    """A worker that calls the work of its jobs with its ``tell``; restarts fail with the next of ``failures``."""

    def __init__(self, *failures):
        self.failures, self.restarts = [*failures], 0

    def run(self, jobs, preset, suffix, tell):
        return [Made(job.settings["work"](tell), 0.0, None, [job.index]) for job in jobs]

    def restart(self):
        self.restarts += 1
        if self.failures and (failure := self.failures.pop(0)):
            raise BatchError(failure)


@pytest.fixture
def dispatcher(request):
    def make(workers, most):
        made = Dispatcher(workers, most)
        request.addfinalizer(lambda: made.stop(10.0))
        return made

    return make


def until_idle(queue):
    with queue._changed:
        assert queue._changed.wait_for(lambda: not queue._running and not queue._waiting, 20)


def run(queue, *work):
    queue.add(task := Noted(*work))
    until_idle(queue)
    return task.events


def broken(tell):
    raise BatchError("the process died")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_queue_takes_as_many_as_it_says(dispatcher, workers, most):
    """One for each worker and ``most`` more, before and after the workers have taken theirs; not one more or less."""
    go_on, queue = threading.Event(), dispatcher([Hands() for _ in range(workers)], most)
    for _ in range(2):
        tasks = [Noted(lambda tell: go_on.wait(60)) for _ in range(workers + most)]
        for task in tasks:
            queue.add(task)
        for _ in range(2):
            with pytest.raises(Busy):
                queue.add(Noted())
            assert all(task.begun.wait(60) for task in tasks[:workers])
        assert (queue.running, queue.waiting) == (workers, most)
        go_on.set()
        until_idle(queue)
        assert all(task.events == [True, None] for task in tasks)
        go_on.clear()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_estimated_wait_follows_the_tasks(dispatcher, monkeypatch, workers):
    """It rises with long tasks, falls with short ones, and is divided by the number of workers."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(dispatching, "time", SimpleNamespace(monotonic=lambda: clock.now))
    queue, waits = dispatcher([Hands() for _ in range(workers)], 3), []
    for seconds in (80.0, 8.0):
        for _ in range(40):
            run(queue, lambda tell, seconds=seconds: setattr(clock, "now", clock.now + seconds))
        go_on = threading.Event()
        for _ in range(workers + 3):
            queue.add(Noted(lambda tell, go_on=go_on: go_on.wait(60)))
        until(lambda: queue.running == workers)
        with pytest.raises(Busy, match="3 requests are waiting") as busy:
            queue.add(Noted())
        waits.append(busy.value.wait)
        clock.now += seconds
        go_on.set()
        until_idle(queue)
    assert waits == [80 * 4 // workers, 8 * 4 // workers]


def test_a_cancelled_task_ends_at_its_step_or_never_begins(dispatcher):
    """The worker makes the next task, and no later job of the cancelled one; its first last event is the error."""
    stepped, go_on, later = threading.Event(), threading.Event(), []

    def steps(tell):
        tell(1, 2)
        stepped.set()
        go_on.wait(60)
        tell(2, 2)

    queue = dispatcher([Hands()], 2)
    running, waiting = Noted(steps, lambda tell: later.append("job")), Noted(lambda tell: later.append("task"))
    queue.add(running), queue.add(waiting)
    assert stepped.wait(60)
    running.cancel(), waiting.cancel()
    assert queue.waiting == 0
    go_on.set()
    assert run(queue, lambda tell: "made") == ["made", None]
    assert later == [] and not waiting.begun.is_set()
    kinds = [[type(event) for event in task.events] for task in (running, waiting)]
    assert kinds == [[dispatching.Step, Cancelled, Cancelled], [Cancelled]]


def test_progress_never_falls(dispatcher):
    """A call begins anew, without partial images that are known, or has several loops; each image has its progress."""
    calls = [[(0, 4), (3, 4, b"part"), (0, 4), (1, 4, b"part"), (5, 6), (4, 4)], [(0, 9), (1, 9, b"part")]]
    work = (lambda tell, call=call: any(tell(*step) for step in call) for call in calls)
    steps = run(dispatcher([Hands()], 1), *work)
    told = [(step.job.index, step.done, step.steps, step.part) for step in steps if isinstance(step, dispatching.Step)]
    assert told[:4] == [(0, 0, 4, None), (0, 3, 4, b"part"), *[(0, 3, 4, None)] * 2]
    assert told[4:] == [(0, 5, 6, None), (0, 4, 4, None), (1, 0, 9, None), (1, 1, 9, b"part")]


def test_a_broken_worker_is_healthy_once_it_restarts_or_makes_a_result(dispatcher):
    """The reason is that of its latest restart."""
    reasons = ["no weights", None, "no memory"]
    queue = dispatcher([Hands(*reasons)], 1)
    for reason in reasons:
        assert isinstance(run(queue, broken)[0], BatchError)
        until(lambda reason=reason: queue.failure == reason)
    assert run(queue, lambda tell: "made") == ["made", None] and queue.failure is None


def test_a_stop_cancels_the_runs_of_all_workers(dispatcher):
    tasks = [Noted(lambda tell: [tell(1, 2) or time.sleep(0.001) for _ in iter(int, 1)]) for _ in range(3)]
    queue = dispatcher([Hands() for _ in tasks], 0)
    for task in tasks:
        queue.add(task)
        assert task.begun.wait(60)
    queue.stop(10.0)
    assert all(isinstance(task.events[-1], Cancelled) for task in tasks) and queue.running == 0


@pytest.mark.parametrize("end", ["close", "stop"])
def test_a_closed_queue_takes_and_restarts_nothing(dispatcher, monkeypatch, end):
    """Waiting tasks are refused; running ones go on after ``close``, and are cancelled by ``stop``."""
    monkeypatch.setattr(dispatching, "LAST_SECONDS", 0.0)
    hands, go_on = Hands(), threading.Event()

    def work(tell):
        go_on.wait(60)
        tell(1, 1)
        raise BatchError("the process died")

    queue = dispatcher([hands], 2)
    running, waiting = Noted(work), Noted(lambda tell: None)
    queue.add(running), queue.add(waiting)
    assert running.begun.wait(60)
    queue.close() if end == "close" else queue.stop(0.0)
    assert [type(event) for event in waiting.events] == [Busy] and running.is_cancelled == (end == "stop")
    go_on.set()
    for thread in queue._threads:
        thread.join(60)
    assert isinstance(running.events[-1], BatchError if end == "close" else Cancelled)
    assert hands.restarts == 0 and not waiting.begun.is_set() and queue.is_closed
    with pytest.raises(Busy, match="shutting down"):
        queue.add(Noted())
