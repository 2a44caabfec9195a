"""Variants of the closed loop's first gaps, for runs in which few steps are computed.

The forecast error at the second computed step decides the next gap. With five or six computed steps these two are a
large share of the work. The loop reuses the first output for the second step where `growth.departures` allows it. The
variants let it last longer, or compute the second step. The first measured error underestimates the next gap's error,
because outputs settle more slowly than a line predicts, so some multiply it (`x1.5`). `own1` to `own4` change one
part of the loop's own rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from dit_accel.loop import controller
from dit_accel.loop.closed_loop import UNREPAIRED, ClosedLoop, Course, Gap


class PriorGap(Gap):
    """Decide the gap after the first step by the expected departures alone.

    Attributes:
        departing: factor on them.
        longest: limit on the first gap in steps.
        least: where the first output reaches less far, in steps, the second step is computed.
        first_error: factor on the first measured error, which decides the second gap.
    """

    departing = 1.0
    longest = 16
    least = 2
    first_error = 1.0

    def _unmeasured(self, step: int, course: Course) -> int:
        reach = 1 if step else self._reach(step, (), 0, 0.0, course)
        return min(reach, self.longest) if reach >= self.least else step + 1

    def expected_error(
        self, step: int, later: int, nodes: Sequence[float], order: float, error: float, course: Course
    ) -> float:
        if not nodes:
            return self.departing * (course.departures or [math.inf] * (later + 1))[later]
        factor = self.first_error if len(nodes) == 1 else 1.0
        return factor * super().expected_error(step, later, nodes, order, error, course)


class OwnGap(Gap):
    """The loop's own gaps, with another limit of the first one, second one or last one.

    Attributes:
        largest: limit on the change to expect at the second step, so that the first output serves it.
        first_error: factor on the first measured error.
        at_least: True = the first measured error counts at least as the change to expect there.
        even: True = if one more computed step suffices, it lies where the larger error of its two gaps is least.
    """

    largest = math.inf
    first_error = 1.0
    at_least = False
    even = False

    def _unmeasured(self, step: int, course: Course) -> int:
        small = course.departures is not None and course.departures[1] <= self.largest
        return super()._unmeasured(step, course) if small else step + 1

    def _reach(self, step: int, nodes: Sequence[float], order: float, error: float, course: Course) -> int:
        if len(nodes) == 1:
            error = self.first_error * max(error, course.departures[step] if self.at_least and course.departures else 0)
        farthest, end = super()._reach(step, nodes, order, error, course), len(course.coordinates)
        if not self.even or farthest == end:
            return farthest

        def summed(start: int, stop: int, nodes: Sequence[float], error: float) -> float:
            steps = range(start + 1, stop)
            return sum(
                course.weights[each] * self.expected_error(start, each, nodes, order, error, course) for each in steps
            )

        fitting = []
        for last in range(max(step + 1, end - self.preset.schedule.max_interval), min(farthest, end - 1) + 1):
            ahead = self.expected_error(step, last, nodes, order, error, course)
            after = UNREPAIRED * summed(last, end, [course.coordinates[step], *nodes], ahead)
            fitting.append((max(summed(step, last, nodes, error), after), -last))
        least, last = min(fitting, default=(math.inf, 0))
        return -last if least <= self.target_error else farthest


class HalfSlopeLoop(ClosedLoop):
    """Forecast with half of the slope where there are only two records, as images do with ``beyond``."""

    def go_on_with(self, best: float) -> None:
        super().go_on_with(best)
        if self.outputs.order == 1 and self.order == 0:
            self.order = 0.5


@dataclass(frozen=True)
class Variant:
    """Variant of the closed loop.

    Args:
        gap, loop: classes that replace the loop's own.
        changes: keys of the preset.
    """

    gap: type[Gap] = Gap
    loop: type[ClosedLoop] = ClosedLoop
    changes: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make pipelines that are accelerated within the block use the variant."""
        with patch.object(controller, "Gap", self.gap), patch.object(controller, "ClosedLoop", self.loop):
            yield


def _own(**changes: Any) -> Variant:
    return Variant(type("ChangedGap", (OwnGap,), changes))


def _prior(loop: type[ClosedLoop] = ClosedLoop, **limits: float) -> Variant:
    return Variant(type("LimitedPriorGap", (PriorGap,), limits), loop)


LOOP = "loop"
VARIANTS = {
    LOOP: Variant(),
    "warm-up 2": Variant(changes={"warmup": 2}),
    "warm-up 3": Variant(changes={"warmup": 3}),
    "error x1.5": Variant(type("SecondGap", (PriorGap,), {"departing": math.inf, "first_error": 1.5})),
    "2 at most": _prior(longest=2),
    "2 at most, error x1.5": _prior(longest=2, first_error=1.5),
    "2 at most, error x2": _prior(longest=2, first_error=2.0),
    "2 at most where 3 fit, error x1.5": _prior(longest=2, least=3, first_error=1.5),
    "prior 1.4, error x1.5": _prior(departing=1.4, first_error=1.5),
    "prior 2": _prior(departing=2.0),
    "prior 2, error x1.5": _prior(departing=2.0, first_error=1.5),
    "own1: error x1.5": _own(first_error=1.5),
    "own2: error of the expected change or more": _own(at_least=True),
    "own3: expected change of 0.09 at most": _own(largest=0.09),
    "own4: the last two gaps even": _own(even=True),
    "half a slope": Variant(loop=HalfSlopeLoop),
    "prior 2, error x1.5, half a slope": _prior(HalfSlopeLoop, departing=2.0, first_error=1.5),
}
