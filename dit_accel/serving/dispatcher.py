"""Bounded queue of a server's requests, or of lines of prompts on Ray, for workers that make one call at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any

from dit_accel.errors import BatchError, DitAccelError, OutOfMemoryError, UnsupportedError
from dit_accel.serving.deadlines import Busy, Times, contract_of
from dit_accel.serving.engine import Cancelled, Loaded, Made, reason_of
from dit_accel.serving.prompts import STREAM, Job
from dit_accel.serving.remote_worker import LoadError, RemoteWorker
from dit_accel.serving.sharing import Sharing, common_of

if TYPE_CHECKING:
    from dit_accel.presets import Preset

logger = logging.getLogger(__name__)

LAST_SECONDS = 1.0  # that all threads have to end; one that restarts its worker goes on
LONGEST_OVERTAKEN = 10.0  # seconds in which tasks for the model that ran last may go first


@dataclass(frozen=True)
class Step:
    """A finished step of a job: finished and all steps, and the file of a partial image or next bytes of a video."""

    job: Job
    done: int
    steps: int
    part: bytes | None = None


class Task:
    """Jobs with a preset (None = plain) and suffix; ``tell`` takes events from any thread, an error or None at last."""

    is_one_call = False  # True: all jobs share a call
    outlives_answer = False  # True: the client asks for the result later
    deadline: float | None = None  # seconds from its creation to its last result
    model: str | None = None  # None = the only one
    started: float | None = None  # when a worker took it, by the monotonic clock
    loaded: Loaded | None = None  # facts of the model, once a worker of several models has chosen it
    runs_alone = False  # True: a call that it shared has failed
    common = cached_property(common_of)  # what tasks that share its call have too

    def __init__(self, jobs: Sequence[Job], preset: Preset | None, suffix: str) -> None:
        self.jobs, self.preset, self.suffix = jobs, preset, suffix
        self.created, self._stop = time.monotonic(), Event()
        self._furthest: dict[int, tuple[int, int]] = {}  # steps done and in all, by a job's index
        self.context = copy_context()  # of its run, so that lines of the log have the request's id

    @property
    def tasks(self) -> list[Task]:  # that run
        return [self]

    @property
    def is_cancelled(self) -> bool:
        return self._stop.is_set()

    def cancel(self) -> None:
        """End the task after its current step, or before it begins; its last event is :class:`Cancelled`, at once."""
        self._stop.set()
        self.tell(Cancelled())

    def begin(self, samples: int = 1) -> None:
        """Note that a worker runs the task now, in calls of so many samples."""

    def breaks(self, error: BaseException) -> bool:
        return isinstance(error, BatchError)

    def tell(self, event: Step | Made | BaseException | None) -> None:
        raise NotImplementedError

    def step(self, job: Job, done: int, steps: int, part: bytes | None = None) -> None:
        if self.is_cancelled:
            raise Cancelled
        before = self._furthest.get(job.index, (0, steps))  # a call may begin anew, or have several loops of steps
        self._furthest[job.index] = latest = max(before, (done, steps), key=lambda step: step[0] / step[1])
        self.tell(Step(job, *latest, part if latest is not before or STREAM in job.settings else None))


class AwaitedTask(Task):
    """A task whose client waits; create it in the event loop that iterates over its steps and results."""

    def __init__(self, jobs: Sequence[Job], preset: Preset | None, suffix: str) -> None:
        super().__init__(jobs, preset, suffix)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Step | Made | BaseException | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Step | Made]:
        while (event := await self._events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event

    def tell(self, event: Step | Made | BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Group(Task):
    """Tasks that share a call. If it fails, ``retry`` gets the group and the error."""

    is_one_call = True

    def __init__(self, tasks: list[Task], retry: Callable[[Group, BaseException], None]) -> None:
        pairs = [(task, job) for task in tasks for job in task.jobs]  # at once: a video that is deleted drops its jobs
        super().__init__([job for _, job in pairs], tasks[0].preset, tasks[0].suffix)
        self.model, self.context = tasks[0].model, tasks[0].context.copy()  # another thread may enter the first one's
        self._tasks, self.left, self._retry = tasks, [task for task, _ in pairs], retry

    @property
    def tasks(self) -> list[Task]:
        return self._tasks

    @property
    def is_cancelled(self) -> bool:
        return all(task.is_cancelled for task in self.tasks)

    def step(self, job: Job, *step: Any) -> None:
        for task, its_job in zip(self.left, self.jobs, strict=True):
            with suppress(Cancelled):
                task.step(its_job, *step)
        if self.is_cancelled:
            raise Cancelled

    def tell(self, event: Step | Made | BaseException | None) -> None:
        if isinstance(event, Made):
            task, waited = self.left[0], event.contract["queue_seconds"] + self.created
            task.tell(replace(event, contract=event.contract | {"queue_seconds": waited - task.created}))
            self.left = self.left[1:]
        elif isinstance(event, BaseException) and not isinstance(event, Cancelled):
            self._retry(self, event)
        else:
            for task in self.tasks:
                task.tell(event)


class Dispatcher:
    """Queue with a thread for each worker; at most ``most`` tasks wait, and up to ``batch_size`` jobs share a call."""

    def __init__(self, workers: Sequence[RemoteWorker], most: float, batch_size: int = 1) -> None:
        self._failures: dict[RemoteWorker, str] = {}  # of workers that could not restart
        self._times, self._sharing = Times(), Sharing(batch_size)
        self._latest: dict[RemoteWorker, str | None] = {}  # model of each worker's last task
        self._idle: set[RemoteWorker] = set()
        self._most = most
        self._waiting: deque[Task] = deque()
        self._running: list[Task] = []
        self._changed, self.is_closed = Condition(), False
        self._seconds = 1.0  # of a task, moving average
        self._threads: list[Thread] = []
        for worker in workers:
            self.hire(worker)

    def hire(self, worker: RemoteWorker) -> None:
        self._latest[worker] = next(iter(getattr(worker, "models", ())), None)
        (thread := Thread(target=self._work, args=(worker,), daemon=True)).start()
        self._threads.append(thread)  # once started: before, it can't be joined

    @property
    def waiting(self) -> int:
        """Drop cancelled tasks from the queue, and count the others."""
        with self._changed:
            for task in [waiting for waiting in self._waiting if waiting.is_cancelled]:
                self._waiting.remove(task)
            return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(len(task.tasks) for task in self._running)

    @property
    def failure(self) -> str | None:
        return next(iter(self._failures.values()), None)

    def add(self, task: Task) -> None:
        """Add a task; raise :class:`Busy` if the queue is full or closed, or the error of an impossible deadline."""
        self._times.limited(task, task.jobs[:1], len(task.jobs))
        with self._changed:
            if self.is_closed:
                raise Busy("the server is shutting down", 10)
            waiting = self.waiting
            if waiting >= self._most + len(self._threads) - len(self._running):
                seconds = self._seconds * (waiting + 1) / len(self._threads)
                raise Busy(f"{waiting} requests are waiting, which is the most", max(1, round(seconds)))
            self._waiting.append(task)
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse waiting tasks and new ones, and cancel running ones whose result is asked for later: it is lost."""
        with self._changed:
            self.is_closed = True
            for task in self._waiting:
                task.tell(Busy("the server is shutting down", 10))
            self._waiting.clear()
            for task in [task for running in self._running for task in running.tasks if task.outlives_answer]:
                task.cancel()
            self._changed.notify_all()

    def stop(self, patience: float) -> None:
        """Close, cancel running tasks, and wait up to ``patience`` seconds for their current steps."""
        self.close()
        for task in [task for running in self._running for task in running.tasks]:
            task.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._running, patience)
        ends = time.monotonic() + LAST_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def _work(self, worker: RemoteWorker) -> None:
        while (task := self._next(worker)) is not None:
            started = time.monotonic()
            try:
                is_broken = not task.context.run(self._run, worker, task)
            finally:
                with self._changed:
                    self._running.remove(task)
                    self._seconds += 0.2 * ((time.monotonic() - started) / len(task.tasks) - self._seconds)
                    self._changed.notify_all()
            if is_broken and not self.is_closed:
                try:
                    worker.restart()
                except BatchError as error:
                    self._failures[worker] = str(error)
                else:
                    self._failures.pop(worker, None)

    def _next(self, worker: RemoteWorker) -> Task | None:
        """Wait for a task: the oldest, or the oldest for the model that the worker ran last."""
        with self._changed:
            self._idle.add(worker)
            while not self.waiting or (task := self._fitting(worker)) is None:
                if self.is_closed:
                    return None
                self._changed.wait()
            self._idle.discard(worker)
            self._latest[worker] = task.model
            tasks = self._sharing.chosen(task, self._waiting, len(self._idle))
            for taken in tasks or [task]:
                self._waiting.remove(taken)
            self._running.append(task := Group(tasks, self._retry) if tasks else task)
            self._changed.notify_all()  # others may take what they left to this worker
            return task

    def _fitting(self, worker: RemoteWorker) -> Task | None:
        """Return the worker's next task; None = idle workers have the models of all that wait."""
        latest, tasks = self._latest[worker], [*self._waiting]
        others = {self._latest[other] for other in self._idle} - {latest}
        if time.monotonic() - tasks[0].created < LONGEST_OVERTAKEN:
            tasks.sort(key=lambda task: task.model != latest)
        return next((task for task in tasks if task.model not in others), None)

    def _run(self, worker: RemoteWorker, task: Task) -> bool:
        """Run a task; return False if the worker broke."""
        end: BaseException | None = None
        try:
            if task.model is not None and isinstance(worker, RemoteWorker):
                task.loaded = worker.choose(task.model)
            calls = [task.jobs] if task.is_one_call else [[job] for job in task.jobs]
            for member in task.tasks:
                member.started = time.monotonic()
                member.begin(len(task.jobs) // max(len(calls), 1))
            for place, jobs in enumerate(calls):
                begun = time.monotonic()
                limited = self._times.limited(task, jobs, len(calls) - place, begins=place == 0)
                for result in worker.run(limited, task.preset, task.suffix, partial(task.step, jobs[0])):
                    if task.tasks == [task]:
                        self._times.take(task, jobs, result, time.monotonic() - begun)
                    else:
                        self._sharing.check(task, result)
                    task.tell(replace(result, contract=contract_of(task, result, begun)))
            self._failures.pop(worker, None)
        except Exception as error:
            if not isinstance(error, Busy | Cancelled | DitAccelError):
                logger.exception("a task failed")
            end = error
        task.tell(end)
        return end is None or not task.breaks(end)

    def _retry(self, group: Group, error: BaseException) -> None:
        """Let tasks run alone, before all that wait; fewer share the next call if their number may be the reason."""
        if isinstance(error, OutOfMemoryError | UnsupportedError | BatchError) and not isinstance(error, LoadError):
            self._sharing.lower(group, len(group.jobs) // 2, reason_of(error))
        with self._changed:
            for task in reversed([*dict.fromkeys(group.left)]):
                task.runs_alone = True
                self._waiting.appendleft(task)
            self._changed.notify_all()
