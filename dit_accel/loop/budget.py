"""Spend a budget of computed steps, or of seconds, where the errors of forecasts are largest.

The closed loop computes again before the summed errors exceed a bound. How many steps a bound costs differs little
between prompts and models (by less than one step, where up to a third of the steps are computed), so a budget begins
with the usual bound. At each computed step the rest of the run is planned from the measured error: which bound spends
exactly the steps that are left? The more of the budget is spent, the more that bound counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from dit_accel.loop.closed_loop import Course, Gap
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset

# A bound θ over N steps computes about K = 5 + 0.39 · (θ / N)^(−0.55) of very many steps (6,000 runs of five models).
LEAST, SCALE, POWER = 5.0, 0.39, 0.55
FEWEST = 0.3  # least K − 5
HALVINGS, RANGE = 10, 4.0  # of the search for a bound, whose logarithm is at most so far from the usual one


class BudgetGap(Gap):
    """Compute a number of steps, or as many as fit into the time."""

    left: int

    def __init__(self, preset: Preset, course: Course) -> None:
        super().__init__(preset, course)
        self.left = preset.schedule.computed_steps or len(course.coordinates)
        self.spent = 0
        self._charged = -1  # latest step that was counted

    def decide_mode(self, step: int) -> StepMode:
        mode, remaining = super().decide_mode(step), len(self.course.coordinates) - step
        if mode is StepMode.DISPATCH and self.left >= remaining:
            mode = StepMode.UPDATE
        if self.left <= 0:
            mode = StepMode.DISPATCH
        if mode is not StepMode.DISPATCH and step != self._charged:
            self.left, self.spent, self._charged = self.left - 1, self.spent + 1, step
        return mode

    def _reach(self, step: int, nodes: Sequence[float], order: float, error: float, course: Course) -> int:
        if not 0 < error < math.inf or course.paces is None:
            return super()._reach(step, nodes, order, error, course)
        places = dict(zip(course.coordinates, course.paces, strict=True))
        paced, nodes = replace(course, coordinates=course.paces, bends=None), [places[node] for node in nodes]
        usual = math.log(usual_bound(self.spent + self.left, len(course.coordinates)))
        low, high = usual - RANGE, usual + RANGE
        for _ in range(HALVINGS):
            self.target_error = math.exp((low + high) / 2)
            is_dear = self._following_steps(step, nodes, order, error, paced) > self.left
            low, high = ((low + high) / 2, high) if is_dear else (low, (low + high) / 2)
        # One record has no slope yet, from which the rest of the run could be planned.
        share = self.spent / (self.spent + self.left) if len(nodes) > 1 else 0.0
        self.target_error = math.exp((1 - share) * usual + share * high)
        return super()._reach(step, nodes, order, error, paced)

    def _most(self, step: int, latest: int) -> int:
        remaining = len(self.course.coordinates) - step
        return max(super()._most(step, latest), math.ceil(remaining / (self.left + 1)))

    def _following_steps(self, step: int, nodes: Sequence[float], order: float, error: float, course: Course) -> int:
        """Return how many later steps compute with the present bound if the outputs keep their curvature.

        Counting ends one above the steps that are left.
        """
        count, end = 0, len(course.coordinates)
        while count <= self.left and (following := super()._reach(step, nodes, order, error, course)) < end:
            error = self.expected_error(step, following, nodes, order, error, course)
            step, nodes, count = following, [course.coordinates[step], *nodes], count + 1
        return count


def usual_bound(computed: int, steps: int) -> float:
    """Return the bound on the summed errors with which so many of the steps usually compute."""
    if computed >= steps:
        return math.exp(-2 * RANGE)
    of_many = (computed**-2 - steps**-2) ** -0.5  # fewer steps limit the number of computed ones
    return steps * (max(of_many - LEAST, FEWEST) / SCALE) ** (-1 / POWER)


class Deadline:
    """Convert the time that is left into computed steps.

    Args:
        seconds: of the whole call, which began at ``started`` (of ``time.perf_counter``).
        after: seconds that the call takes after its steps, for decoding.
    """

    def __init__(self, seconds: float, started: float, after: float) -> None:
        self._limit = seconds - after
        self._started = self._begun = self._ended = started
        self._spent = 0.0  # seconds of the present step, if it computes
        self._cost, self._overhead = math.inf, 0.0  # seconds of a computed step, and of any step outside of the model
        self._steps = 0  # since the latest computed one

    def begin_step(self) -> None:
        """Note that a step begins."""
        if self._spent:
            self._cost, self._spent, self._steps = min(self._cost, self._spent), 0.0, 0
        self._begun, self._steps = time.perf_counter(), self._steps + 1

    def numbers(self) -> list[float]:
        """Return the numbers that :meth:`left` takes; devices that share a call agree on their maxima."""
        if not self._spent and self._ended > self._started:
            self._overhead = (self._begun - self._ended) / self._steps
        return [self._begun - self._started, self._cost, self._overhead]

    def left(self, numbers: Sequence[float], remaining: int) -> int:
        """Return how many of the remaining steps may compute, once the host has waited for a computed call."""
        begun, cost, overhead = numbers
        self._ended = time.perf_counter()
        self._spent = self._ended - self._begun
        if math.isinf(cost):
            return remaining
        return max(int((self._limit - begun - remaining * overhead) / cost) - 1, 0)
