"""Deadlines of requests and lines, and what a run kept of its contract."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dit_accel.errors import ArgumentError
from dit_accel.serving.engine import Made
from dit_accel.serving.prompts import DEADLINE, Job

ALWAYS = 3  # steps that compute whatever the deadline
SIZE = ("height", "width", "num-frames", "steps")  # settings of a job that decide its time
KEPT, LATEST = 256, 8  # sizes whose times are kept, and runs of each


class Busy(Exception):
    """Error of a full queue, or of a server that shuts down; ``wait`` is an estimate of the seconds until a retry."""

    def __init__(self, reason: str, wait: int) -> None:
        super().__init__(reason)
        self.wait = wait


class Times:
    """Seconds of the latest runs, and of their ends after the last step, by preset and size; the upper quartile counts.

    So most runs keep a deadline that is just accepted, and a slow first run is forgotten.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[Any, ...], list[tuple[float, float]]] = {}

    def take(self, task: Any, jobs: Sequence[Job], result: Made, seconds: float) -> None:
        """Note a run; with fewer computed steps it takes the time of the others less."""
        steps = result.report["steps"] if result.report else []
        computed = sorted(step["seconds"] for step in steps if step["mode"] != "dispatch")
        end = seconds - result.seconds - result.stages.get("text encoding", 0.0)
        before = self._latest.pop(key := _key(task, jobs), [])
        self._latest[key] = [*before, (seconds - sum(computed[ALWAYS:]), end)][-LATEST:]
        for oldest in list(self._latest)[:-KEPT]:
            self._latest.pop(oldest, None)

    def limited(self, task: Any, jobs: Sequence[Job], calls: int, *, begins: bool = True) -> Sequence[Job]:
        """Return the jobs of the next of so many calls, with the time that the task's deadline leaves for it.

        A task that begins can raise ``ArgumentError``, or ``Busy`` after a wait, with the nearest possible deadline.
        """
        if (limit := task.deadline) is None:
            return jobs
        ends = (end for runs in list(self._latest.values()) for _, end in runs)
        runs = self._latest.get(_key(task, jobs)) or [(0.0, max(ends, default=0.0))]
        fewest, end = (sorted(values)[3 * (len(runs) - 1) // 4] for values in zip(*runs, strict=True))
        waited, needed = time.monotonic() - task.created, calls * fewest
        if begins and needed > limit:
            raise ArgumentError("max_seconds", f"must be at least {needed:.3g} for this model and size, got {limit:g}")
        if begins and waited + needed > limit:
            reason = f"{waited:.3g} of max_seconds {limit:g} are over and a run takes {needed:.3g}"
            raise Busy(f"{reason}, so the nearest deadline is {waited + needed:.3g}", 1)
        return [replace(job, settings=job.settings | {DEADLINE: ((limit - waited) / calls, end)}) for job in jobs]


def _key(task: Any, jobs: Sequence[Job]) -> tuple[Any, ...]:
    return task.model, task.preset and task.preset.name, len(jobs), *map(jobs[0].settings.get, SIZE)


def contract_of(task: Any, result: Made, begun: float) -> dict[str, Any]:
    """Return what a run that has just ended kept of its task's contract."""
    from dit_accel.loop.budget import kept_targets

    now = time.monotonic()
    facts: dict[str, Any] = {"queue_seconds": begun - task.created, "run_seconds": now - begun, "decided_by": "preset"}
    in_time = None if task.deadline is None else now - task.created <= task.deadline
    return facts | (kept_targets(task.preset, result.report, in_time) if task.preset and result.report else {})
