"""Requests that wait and can share a call of the pipeline."""

import logging
from collections.abc import Iterable
from typing import Any

from dit_accel.errors import PresetError
from dit_accel.loop.report import TOGETHER
from dit_accel.serving.engine import Made
from dit_accel.serving.prompts import PARTIAL_IMAGES, STREAM

logger = logging.getLogger(__name__)

ALONE = ("image", "mask", PARTIAL_IMAGES, STREAM)  # settings that a call has for one sample


def common_of(task: Any) -> tuple[Any, ...] | None:
    """Return what tasks that share a call with this one have too; None = it has calls of its own."""
    from dit_accel.models.presets import decided_apart

    preset, settings = task.preset, next((job.shared for job in task.jobs), {})
    if not settings or task.deadline is not None or any(name in settings for name in ALONE):
        return None
    try:
        is_apart = preset is None or not preset.schedule.measures or decided_apart(preset).schedule.per_prompt
    except PresetError:
        return None
    return (task.model, preset, task.suffix, settings) if is_apart else None


class Sharing:
    """Choose tasks that share a call of up to ``most`` samples, fewer of sizes of which such calls have failed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._fewer: dict[tuple[Any, ...], int] = {}  # by model and size

    def chosen(self, first: Any, waiting: Iterable[Any], idle: int) -> list[Any]:
        """Return the first task and others in their order, of which idle workers get their part; empty = it runs alone.

        Tasks with equal seeds stay apart, because the engine may take equal noise for branches of guidance.
        """
        if self._most == 1 or first.runs_alone or first.common is None:
            return []
        chosen, others = [first], [task for task in waiting if task is not first and not task.runs_alone]
        room, seeds = self._fewer.get(_size(first), self._most) - len(first.jobs), _seeds(first)
        for task in others:
            fits = len(task.jobs) <= room and seeds.isdisjoint(_seeds(task)) and task.common == first.common
            if fits and len(chosen) <= len(others) // (idle + 1):
                chosen.append(task)
                seeds |= _seeds(task)
                room -= len(task.jobs)
        return chosen if room >= 0 and (len(chosen) > 1 or len(first.jobs) > 1) else []

    def check(self, group: Any, result: Made) -> None:
        """Let samples of this size share no later call if the report says that they were not decided apart."""
        notes = (result.report or {}).get("notes", ())
        if reason := next((note for note in notes if note.startswith(TOGETHER)), None):
            self.lower(group, 1, reason)

    def lower(self, task: Any, most: int, reason: str) -> None:
        """Let at most so many samples of the task's model and size share the next calls."""
        if (most := max(most, 1)) < self._fewer.get(_size(task), self._most):
            self._fewer[_size(task)] = most
            logger.warning("calls of this size make at most %d from now on: %s", most, reason)


def _size(task: Any) -> tuple[Any, ...]:
    return task.model, *(job.settings.get(key) for job in task.jobs[:1] for key in ("height", "width", "num-frames"))


def _seeds(task: Any) -> set[int | None]:
    return {job.settings.get("seed") for job in task.jobs}
