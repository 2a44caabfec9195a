"""Spend a budget of computed steps, or of seconds, where the errors of forecasts are largest.

The closed loop computes again before the summed errors exceed a bound. How many steps a bound costs, and which share of
them has computed at each point of a run, differs little between prompts, models and schedules. So a budget begins with
the bound that usually costs it, and each computed step adapts the bound to the steps that are left.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from dit_accel.loop.closed_loop import Course, Gap
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset
from dit_accel.presets.sections import CUT

# Fitted to 6,000 runs of five models with 12 to 100 steps: a bound θ over N steps computes 2.5 + 1.15 · (θ / N)^(−0.4)
# of very many steps, and 1.5 more with guidance. Once x of the run is over, 0.27 + 0.66 · x of them have computed.
LEAST, SCALE, POWER = 2.5, 1.15, 0.4
FEWEST = 1.0  # least K − 2.5: with fewer steps no bound is much better than another
GUIDED = 1.5
START, RATE = 0.27, 0.66


class BudgetGap(Gap):
    """Compute a number of steps, or as many as fit into the time, but no more than ``target_psnr`` needs."""

    def __init__(self, preset: Preset, course: Course) -> None:
        super().__init__(preset, course)
        self._steps = len(course.coordinates)
        self.left = self.most = preset.schedule.computed_steps or self._steps
        self._floor = 0.0 if preset.schedule.target_psnr is None else self.target_error
        self._charged = self._planned = -1  # latest step that was counted, and from which the rest was planned

    def decide_mode(self, step: int) -> StepMode:
        mode = super().decide_mode(step)
        if mode is StepMode.DISPATCH and self.left >= self._steps - step and not self._floor:
            mode = StepMode.UPDATE
        if self.left <= 0:
            if self._floor and mode is not StepMode.DISPATCH:
                self.note(CUT)
            mode = StepMode.DISPATCH
        if mode is not StepMode.DISPATCH and step != self._charged:
            self.left, self.spent, self._charged = self.left - 1, self.spent + 1, step
        return mode

    def observe(self, step: int, *measured: Any, **of: Any) -> int:
        if step != self._planned:
            self._plan(step)
        return super().observe(step, *measured, **of)

    def _plan(self, step: int) -> None:
        """Set the bound: at first the usual one, and more and more the one that the steps that are left afford."""
        usual = usual_bound(max(self.spent + self.left - GUIDED * self._is_guided, 1), self._steps)
        to_come = 1 - START - RATE * (step + 0.5) / self._steps  # share of the steps that compute
        affordable = usual_bound((self.left + 0.5) / to_come, self._steps)
        over = (step + 1) / self._steps
        bound = usual ** (1 - over) * affordable**over
        if self._floor and (self.left >= self._steps - step - 1 or bound <= self._floor):
            bound = self._floor
        elif self._floor:
            self.note(CUT)
        self.target_error, self._planned = bound, step

    def _most(self, step: int, latest: int) -> int:
        needed = math.ceil((self._steps - step) / (self.left + 1))
        return max(super()._most(step, latest), 0 if self._floor else needed)


def usual_bound(computed: float, steps: int) -> float:
    """Return the bound on the summed errors with which so many of the steps usually compute."""
    computed = min(computed, steps - 0.5)  # all steps compute with a small bound
    of_many = (computed**-2 - steps**-2) ** -0.5  # fewer steps limit the number of computed ones
    return steps * (max(of_many - LEAST, FEWEST) / SCALE) ** (-1 / POWER)


def kept_targets(preset: Preset, report: dict[str, Any], in_time: bool | None) -> dict[str, Any]:
    """Return the targets that a run kept, by its report, and the term that decided its steps; None = no deadline."""
    schedule, steps = preset.schedule, len(report["steps"])
    computed = steps - report["steps_by_mode"].get("dispatch", 0)
    facts = {"steps": steps, "computed_steps": computed}
    budget, is_cut = min(schedule.computed_steps or steps, steps), CUT in report["notes"]
    if in_time is not None:
        facts["deadline_met"] = in_time
        is_cut |= schedule.target_psnr is None and (computed < budget or schedule.computed_steps is None)
    if schedule.target_psnr is not None:
        facts["floor_met"] = not is_cut
    spent = schedule.computed_steps and computed == budget
    terms = {"deadline": is_cut, "floor": schedule.target_psnr, "budget": spent, "preset": True}
    return facts | {"decided_by": next(term for term, decides in terms.items() if decides)}


class Deadline:
    """Convert the time that is left into computed steps.

    Args:
        seconds: of the whole call, which began at ``started`` (of ``time.perf_counter``).
        after: seconds that the call takes after its steps, for decoding.
    """

    def __init__(self, seconds: float, started: float, after: float) -> None:
        self._seconds, self._after, self._limit = seconds, after, seconds - after
        self._started = self._begun = self._ended = started
        self._spent = 0.0  # seconds of the present step, if it computes
        self._costs, self._overhead = list[float](), 0.0  # seconds of computed steps; of any step outside of the model
        self._steps = 0  # since the latest computed one

    def of_run(self, number: int, runs: int) -> Deadline:
        """Return the deadline of a run of the call, from 1 on, which shares the time that is left with later runs."""
        left, passed = max(runs - number + 1, 1), time.perf_counter() - self._started
        free = self._seconds - passed - self._after * left / max(runs, number)
        return Deadline(passed + free / left, self._started, 0.0)

    def begin_step(self) -> None:
        if self._spent:
            self._costs.append(self._spent)
            self._spent, self._steps = 0.0, 0
        self._begun, self._steps = time.perf_counter(), self._steps + 1
        if self._ended > self._started:
            self._overhead = (self._begun - self._ended) / self._steps

    def left(self, remaining: int) -> int:
        """Return how many of the remaining steps may compute, once the host has waited for a computed call."""
        self._ended = time.perf_counter()
        self._spent = self._ended - self._begun
        if not self._costs:
            return remaining
        free = self._limit - (self._ended - self._started) - remaining * self._overhead
        return max(int(free / statistics.median_low(self._costs[-3:])), 0)  # the first ones may compile or capture
