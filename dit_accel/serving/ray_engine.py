"""An engine on a Ray cluster, whose devices share the lines of ``generate --prompts``.

Jobs of an actor that dies, or fails with an error that a retry may avoid, run again at the end, one job per call.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rich.console import Console

from dit_accel.errors import ArgumentError, BatchError, DitAccelError, OutOfMemoryError, UnsupportedError
from dit_accel.serving.dispatcher import Dispatcher, Step, Task
from dit_accel.serving.engine import Failure, Loaded, Made, made_alone, reason_of
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import CONTRACT, Job, contracted
from dit_accel.serving.ray_cluster import RayActor, joined_cluster
from dit_accel.serving.remote_worker import LoadError, RemoteWorker

ATTEMPTS = 3  # for each line, and in a row for loading the pipeline on a device


@contextmanager
def ray_engine(setup: Setup, actors: int | None, console: Console) -> Iterator[RayEngine]:
    with joined_cluster(setup, actors, console) as (setup, count, needs):
        start = partial(RayActor, needs)
        workers = [RemoteWorker(setup, None, start, attempts=1) for _ in range(min(count, len(setup.jobs)))]
        engine = RayEngine(workers, console)
        try:
            engine.wait_for_one()
            yield engine
        finally:
            engine.close()


class _Batch(Task):
    """Jobs that share a call; their end goes to a queue, as the batch and its error or None."""

    is_one_call = True

    def __init__(self, jobs: Sequence[Job], loaded: Loaded, ends: SimpleQueue[_Event]) -> None:
        settings = jobs[0].settings
        base = loaded.requested if settings.keys() & set(CONTRACT) else loaded.preset
        super().__init__(jobs, contracted(base, settings, loaded.form), loaded.suffix)
        self.results: list[Made] = []
        self._ends = ends

    def begin(self, samples: int = 1) -> None:
        self.created, self.deadline = time.monotonic(), self.jobs[0].settings.get("max_seconds")  # of the run alone

    def breaks(self, error: BaseException) -> bool:
        """Return True unless a retry on this device cannot help, or the batch alone was too large for its memory."""
        is_too_large = len(self.jobs) > 1 and isinstance(error, OutOfMemoryError)
        return not is_too_large and not isinstance(error, UnsupportedError | ArgumentError)

    def tell(self, event: Step | Made | BaseException | None) -> None:
        if isinstance(event, Made):
            self.results.append(event)
        elif not isinstance(event, Step):
            self._ends.put((self, event))


_Event = Loaded | Exception | tuple[_Batch, BaseException | None]  # of a worker that loads, or the end of a batch


class RayEngine:
    """Engine of several workers, each of which takes jobs as soon as its pipeline has loaded."""

    def __init__(self, workers: Sequence[RemoteWorker], console: Console) -> None:
        self._workers, self._console = workers, console
        self._left = len(workers)  # workers that load or have loaded
        self._failed_loads = 0  # in a row, of workers that were replaced
        self._notes: set[str] = set()
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._dispatcher = Dispatcher([], math.inf)
        for worker in workers:
            Thread(target=self._load, args=(worker,), daemon=True).start()

    def wait_for_one(self) -> None:
        with self._console.status(f"loading the pipeline in {self._left} actors"):
            while not isinstance(event := self._events.get(), Loaded):
                self._lose(event)
        self.loaded, self.suffix = event, event.suffix

    def make_all(self, batches: Sequence[Sequence[Job]], progress: Any) -> Iterator[tuple[Job, Made | Failure]]:
        unfinished, attempts = len(batches), Counter[int]()
        for batch in batches:
            self._add(batch)
        while unfinished:
            progress.begin(f"{self._dispatcher.running} actors at work")
            event = self._events.get()
            if isinstance(event, Exception):
                self._lose(event)
            if not isinstance(event, tuple):
                continue
            batch, error = event
            retried = [] if error is None else self._retried(batch.jobs, error, attempts)
            for job in retried:
                self._add([job])
            unfinished += len(retried) - 1
            if error is None:
                self._failed_loads = 0
                yield from zip(batch.jobs, batch.results, strict=True)
            elif not retried:
                yield batch.jobs[0], Failure(reason_of(error))

    def close(self) -> None:
        self._dispatcher.close()
        for worker in self._workers:
            worker.close()
        self._dispatcher.stop(0.0)

    def _add(self, batch: Sequence[Job]) -> None:
        self._dispatcher.add(_Batch(batch, self.loaded, self._events))

    def _load(self, worker: RemoteWorker) -> None:
        """Wait for a worker's pipeline, which loads again after an error that a retry may avoid."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._events.put(worker.wait() if attempt == 1 else worker.restart())
                return self._dispatcher.hire(worker)
            except Exception as error:
                is_final = isinstance(error, DitAccelError) and not isinstance(error, BatchError)
                if is_final or attempt == ATTEMPTS:
                    return self._events.put(error)

    def _lose(self, error: Exception) -> None:
        self._left -= 1
        if self._left:
            self._note(f"an actor can't load the pipeline: {reason_of(error)}")
        else:
            is_final = isinstance(error, DitAccelError) and not isinstance(error, BatchError)
            raise error if is_final else BatchError(f"no actor can load the pipeline: {reason_of(error)}")

    def _retried(self, jobs: Sequence[Job], error: BaseException, attempts: Counter[int]) -> Sequence[Job]:
        """Return the jobs of a batch that failed, each of which is to run alone; none if a retry cannot help."""
        if isinstance(error, LoadError):  # which says nothing about the jobs
            self._failed_loads += 1
            if self._failed_loads >= ATTEMPTS * self._left:
                raise BatchError(f"no actor can load the pipeline: {reason_of(error)}")
            return jobs
        if len(jobs) > 1:
            self._note(made_alone(jobs, error))
            return jobs
        if isinstance(error, UnsupportedError | ArgumentError):
            return []
        (job,) = jobs
        attempts[job.index] += 1
        self._note(f"line {job.index + 1}, attempt {attempts[job.index]} of {ATTEMPTS}: {reason_of(error)}")
        return jobs if attempts[job.index] < ATTEMPTS else []

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._console.out(f"note: {text}", highlight=False)
