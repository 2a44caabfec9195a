"""Variants of the closed loop's first gaps, for runs in which few steps are computed.

The loop computes the first two steps, and the forecast error at the second one decides the first gap. With five or six
computed steps that is a large share of the work. Models move their output from that of pure noise, F_0, by about
``‖F − F_0‖ / ‖F‖ = c · (σ_0 − σ)^q`` with q = 0.6 and c = 0.8 on `demo-flux`, 0.4 to 0.7 on the video models. The
variants use this law in place of the second computed step. Their first measured error underestimates the next gap's
error, because outputs settle more slowly than a line predicts, so some multiply it (`x1.5`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from dit_accel.loop import controller
from dit_accel.loop.closed_loop import ClosedLoop, Course, Gap
from dit_accel.loop.growth import BEND

MOVED = 0.8  # c
POWER = 0.6  # q


def movement(course: Course, step: int) -> float:
    """Return ``(σ_0 − σ)^q`` of a step."""
    first, level = (course.bends[each] ** (-1 / BEND) for each in (0, step))
    return max(first - level, 0.0) ** POWER


class PriorGap(Gap):
    """Decide the gap after the first step by the law; needs a warm-up of 1.

    Attributes:
        moved: c of the law.
        longest: limit on the first gap in steps.
        least: where the law reaches less far, in steps, the second step is computed.
        first_error: factor on the first measured error, which decides the second gap.
    """

    moved = MOVED
    longest = 16
    least = 2
    first_error = 1.0

    def observe(
        self, step: int, nodes: Sequence[float], order: float, error: float, course: Course | None = None
    ) -> int:
        following = super().observe(step, nodes, order, error, course)
        if step == 0:
            following = min(following, self.longest) if following >= self.least else 1
            self._next_update = min(self._next_update, following)
        return following

    def expected_error(
        self, step: int, later: int, nodes: Sequence[float], order: float, error: float, course: Course
    ) -> float:
        if step == 0 and not nodes:
            return self.moved * movement(course, later)
        factor = self.first_error if len(nodes) == 1 else 1.0
        return factor * super().expected_error(step, later, nodes, order, error, course)


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


def _prior(loop: type[ClosedLoop] = ClosedLoop, **limits: float) -> Variant:
    return Variant(type("LimitedPriorGap", (PriorGap,), limits), loop, {"warmup": 1})


LOOP = "loop"
VARIANTS = {
    LOOP: Variant(),
    "warm-up 3": Variant(changes={"warmup": 3}),
    "error x1.5": Variant(type("SecondGap", (PriorGap,), {"moved": math.inf, "first_error": 1.5})),
    "2 at most": _prior(longest=2),
    "2 at most, error x1.5": _prior(longest=2, first_error=1.5),
    "2 at most, error x2": _prior(longest=2, first_error=2.0),
    "2 at most where 3 fit, error x1.5": _prior(longest=2, least=3, first_error=1.5),
    "prior 1.4, error x1.5": _prior(moved=1.4, first_error=1.5),
    "prior 2": _prior(moved=2.0),
    "prior 2, error x1.5": _prior(moved=2.0, first_error=1.5),
    "half a slope": Variant(loop=HalfSlopeLoop),
    "prior 2, error x1.5, half a slope": _prior(HalfSlopeLoop, moved=2.0, first_error=1.5),
}
