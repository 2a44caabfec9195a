"""An engine on a Ray cluster, whose devices share the jobs.

One actor per device loads the pipeline once and runs one batch of jobs at a time. If an actor dies, or fails with an
error that a retry may avoid, a new actor replaces it and its jobs go to the end of the queue, one job per call.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dit_accel.errors import ArgumentError, BatchError, DitAccelError, OutOfMemoryError, UnsupportedError
from dit_accel.serving.engine import Failure, JobProgress, Made, made_alone, reason_of
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.ray_cluster import enter_folder, joined_cluster
from dit_accel.serving.worker import Worker

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console

ATTEMPTS = 3  # for each line, and in a row for loading the pipeline on a device


@contextmanager
def ray_engine(
    setup: Setup, picture: Image.Image | None, jobs: Sequence[Job], actors: int | None, console: Console
) -> Iterator[RayEngine]:
    """Start actors that load the pipeline, on the cluster of this process, at ``RAY_ADDRESS``, or a new cluster.

    Raises:
        ArgumentError, ...: errors of :class:`Worker`, if no actor could load the pipeline.
        BatchError: no actor could load the pipeline because of another error.
    """
    with joined_cluster(setup, actors, console) as (setup, count, needs):
        engine = RayEngine(setup, picture, jobs, min(count, len(jobs)), needs, console)
        try:
            engine.wait_for_one()
            yield engine
        finally:
            engine.close()


class RayEngine:
    """Engine of several actors; ``suffix`` and ``preset`` are set once an actor has loaded the pipeline."""

    suffix: str
    preset: dict[str, Any] | None

    def __init__(
        self,
        setup: Setup,
        picture: Image.Image | None,
        jobs: Sequence[Job],
        count: int,
        needs: dict[str, int],
        console: Console,
    ) -> None:
        import ray

        self._actor = ray.remote(**needs)(_Actor)
        self._opens = ray.put((setup, picture, jobs)), os.getcwd()
        self._console = console
        self._opening: dict[Any, tuple[Any, int]] = {}  # future: actor, earlier attempts
        self._busy: dict[Any, tuple[Any, Sequence[Job]]] = {}  # future: actor, its jobs
        self._idle: list[Any] = []
        self._told: set[str] = set()
        for _ in range(count):
            self._open()

    def wait_for_one(self) -> None:
        """Wait until an actor has loaded the pipeline."""
        with self._console.status(f"loading the pipeline in {len(self._opening)} actors"):
            while not self._idle:
                self._opened(self._next())

    def make_all(self, batches: Sequence[Sequence[Job]], progress: JobProgress) -> Iterator[tuple[Job, Made | Failure]]:
        waiting, attempts = deque(batches), Counter[int]()
        while waiting or self._busy:
            self._hand_out(waiting)
            progress.begin(f"{len(self._busy)} actors at work")
            done = self._next()
            if done in self._opening:
                self._opened(done)
                continue
            actor, batch = self._busy.pop(done)
            made = self._result(done)
            if not isinstance(made, BaseException):
                self._idle.append(actor)
                self._hand_out(waiting)  # before the caller writes the files
                yield from zip(batch, made, strict=True)
                continue
            refused = _refuses(made)
            if refused or (len(batch) > 1 and isinstance(made, OutOfMemoryError)):
                self._idle.append(actor)
            else:
                self._replace(actor)
            if len(batch) > 1:
                self._note(made_alone(batch, made))
                waiting.extend([job] for job in batch)
                continue
            (job,) = batch
            attempts[job.index] += 1
            if not refused:
                self._note(f"line {job.index + 1}, attempt {attempts[job.index]} of {ATTEMPTS}: {reason_of(made)}")
                if attempts[job.index] < ATTEMPTS:
                    waiting.append(batch)
                    continue
            yield job, Failure(reason_of(made))

    def close(self) -> None:
        """End all actors."""
        import ray

        for actor in [*self._idle, *(actor for actor, _ in (*self._opening.values(), *self._busy.values()))]:
            ray.kill(actor)

    def _next(self) -> Any:
        """Wait for a future that has finished or failed."""
        import ray

        (done,), _ = ray.wait([*self._busy, *self._opening])
        return done

    def _hand_out(self, waiting: deque[Sequence[Job]]) -> None:
        while waiting and self._idle:
            actor, batch = self._idle.pop(), waiting.popleft()
            self._busy[actor.make.remote(batch)] = actor, batch

    def _open(self, attempts: int = 0) -> None:
        actor = self._actor.remote()
        self._opening[actor.open.remote(*self._opens)] = actor, attempts

    def _opened(self, done: Any) -> None:
        """Add an actor that has loaded the pipeline; replace it if it failed, unless a retry cannot help."""
        import ray

        actor, attempts = self._opening.pop(done)
        result = self._result(done)
        if not isinstance(result, BaseException):
            self.suffix, self.preset = result
            self._idle.append(actor)
            return
        ray.kill(actor)
        if not isinstance(result, DitAccelError) and attempts + 1 < ATTEMPTS:
            self._open(attempts + 1)
        elif self._opening or self._busy or self._idle:
            self._note(f"an actor can't load the pipeline: {reason_of(result)}")
        elif isinstance(result, DitAccelError):
            raise result
        else:
            raise BatchError(f"no actor can load the pipeline: {reason_of(result)}")

    def _note(self, text: str) -> None:
        """Print a problem once, even if all actors report it."""
        if text not in self._told:
            self._told.add(text)
            self._console.out(f"note: {text}", highlight=False)

    def _replace(self, actor: Any) -> None:
        import ray

        ray.kill(actor)
        self._open()

    @staticmethod
    def _result(done: Any) -> Any:
        """Return the value of a future, or the exception of the actor or of Ray."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(done)
        except RayTaskError as error:
            return error.cause
        except RayError as error:
            return error


class _Actor:
    """A :class:`Worker` in its own process, in the command's folder if it exists on that machine."""

    def open(self, what: tuple[Setup, Image.Image | None, Sequence[Job]], folder: str) -> tuple[str, Any]:
        enter_folder(folder)
        self._worker = Worker(*what)
        return self._worker.suffix, self._worker.preset

    def make(self, batch: Sequence[Job]) -> list[Made]:
        return self._worker.make(batch)


def _refuses(error: BaseException) -> bool:
    """Return True if retrying cannot help."""
    return isinstance(error, UnsupportedError | ArgumentError)
