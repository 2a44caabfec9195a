"""The closed loop: a computed step measures the forecast error, sets the next computed step and corrects the latents.

The transformer's outputs F are known at the computed steps, at coordinates t (step indices, noise levels or their
log-odds). At the other steps the output is forecast by the polynomial through the newest records. At each computed step
the loop does this:

1. **Correct.** Once F is known, the forecast steps before it lie between records. The polynomial through F and the
   records that made the forecasts, in log-odds of the noise level, approximates their outputs far better than the
   extrapolation did. The latents are off by ``δ = Σ_i m_i · (F̄_i − F̂_i)``, with F̂ the forecasts, F̄ the
   interpolation and m_i the factor of step i's output in the latents (:mod:`dit_accel.loop.moves`). At the right
   latents the output would have been ``F + J δ`` (J: :mod:`dit_accel.loop.growth`). The loop records ``F + J δ``, and
   the pipeline continues with ``F + J δ + δ' / m'``, with δ' and this step's own move m' at the end of the run.
2. **Measure.** A forecast of F from the older records costs no step. Its error ``e = ‖F − F̂‖ / ‖F‖`` is measured for
   every degree and, with damping, for the share of the slope that fitted best one computed step before.
3. **Decide.** A polynomial of degree D through the outputs at D + 1 nodes has the error
   ``F^(D+1) / (D+1)! · Π_k (t − t_k)`` (remainder of interpolation). The measured e determines the first factor. The
   next forecasts use this step as a node instead of the oldest, so at step n their error is
   ``e_n = e · b_n / b · Π_k |t_n − t'_k| / Π_k |t − t_k|``, with b the bend of the outputs there. The loop continues
   with the degree that reaches farthest. The next computed step comes after the largest 1 <= n <= max_interval with
   ``Σ_(i<n) w_i · e_i <= target_error``, with w_i the weight of an error i steps from here (w and b:
   :mod:`dit_accel.loop.growth`), and n at most WIDENING times the previous interval, because an error says little
   about steps much farther away. No later step corrects a gap that reaches past the last step that moves the result.
   So UNREPAIRED times its error must be within the target; otherwise that step is computed. What nothing has measured
   is computed: after an output that no forecast could be compared with, the next step.

A :class:`ClosedLoop` does this for the samples of a batch that are decided together, in one branch of classifier-free
guidance. Branches share a :class:`Gap`: all of them compute in the same steps, and the branch with the largest error
decides which. :class:`~dit_accel.loop.interval.IntervalLoop` computes on a fixed interval and measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from dit_accel.kernels import weighted_sum
from dit_accel.loop.forecast import History, best_share, forecast, forecast_weights, missed_weights, relative_error
from dit_accel.loop.moves import Moves
from dit_accel.loop.rows import Rows
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset

ABOUT = 0.9  # share of the farthest reach that counts as equal; 1.0 and 0.8: 1 dB lower at equal FLOPs (demo model)
WIDENING = 3  # largest ratio of neighbouring intervals
LEAST_LASTING = 0.1  # least share of an output's largest move that lasts; below it the correction would overshoot
LEAST_MOVE = 0.01  # share of the move before: stages of pyramids end with 0.001, Karras's sigmas keep over 0.3
UNREPAIRED = 2.0  # factor on the error of a gap after which no computed step corrects it
NO_SLOPE = 2.0**-20  # share of the slope in place of 0, so that the degree still counts as a damped one

Output = tuple[torch.Tensor, ...]  # the tensors of a transformer's output, batch first


@dataclass(frozen=True)
class Course:
    """Coordinates, weights and moves of a run's steps; each sequence has one entry a step."""

    coordinates: Sequence[float]  # variable of the forecast polynomial: step indices, sigmas or their log-odds
    weights: Sequence[float]  # weight of an error of the step's output
    # factors of the outputs in the latents, and one more for the end of the run; None = unknown: nothing is corrected
    moves: Moves | None = None
    responses: Sequence[float] | None = None  # change of the step's output per shift of the latents; None = no change
    # bend of the outputs at the step, relative to other steps; None = the same at all steps
    bends: Sequence[float] | None = None
    # variable of the interpolation between records; None = that of the forecasts
    log_odds: Sequence[float] | None = None
    # courses of the second and later outputs by name, if they have schedules of their own
    further: Mapping[str, Course] = field(default_factory=dict)

    @cached_property
    def lasting(self) -> int:
        """Number of steps up to the last one that moves the result; a later one, of no noise left, corrects no gap."""
        moves = [1.0] * len(self.coordinates) if self.moves is None else [*map(abs, self.moves[-1])]
        ends = (end for end in range(1, len(moves)) if max(moves[end:]) < LEAST_MOVE * moves[end - 1])
        return next(ends, len(moves))

    def places(self) -> Mapping[float, float]:
        """Return the variable of the interpolation between records, by coordinate."""
        return dict(zip(self.coordinates, self.log_odds or self.coordinates, strict=True))


class Gap:
    """Decide when some samples compute next, in all branches of one transformer."""

    left = most = spent = 0  # steps that a budget leaves, has in all, and has spent
    note: Callable[[str], None] = staticmethod(lambda remark: None)  # adds a remark to the report

    def __init__(self, preset: Preset, course: Course) -> None:
        self.preset = preset
        self.course = course
        self.target_error = preset.schedule.bound
        self.restart()

    def restart(self) -> None:
        """Forget decisions, because the records that they rest on were dropped."""
        self.computed_step = -1  # the latest step decided to compute
        self._decided: tuple[int, StepMode] | None = None
        self._asking: set[object] = set()  # branches that asked for this step's mode
        self._is_guided = False  # an earlier step had several branches
        self._following: dict[object, int] = {}  # next computed step, by the outputs that decided it since then

    @property
    def damps(self) -> bool:
        """Return True if the share of the slope that fits best is tried."""
        damping = self.preset.forecast.damping
        return self._is_guided if damping == "guided" else damping

    def mode(self, step: int, branch: object = None) -> StepMode:
        """Return the step's mode, decided at the first request of a branch."""
        if self._decided is None or self._decided[0] != step:
            self._is_guided |= len(self._asking) > 1  # fixed for a whole step, so that ranks measure alike
            self._asking.clear()
            self._decided = step, self.decide_mode(step)
            if self._decided[1] is not StepMode.DISPATCH:
                self.computed_step = step
                self._following.clear()
        self._asking.add(branch)
        return self._decided[1]

    def decide_mode(self, step: int) -> StepMode:
        """Return whether the step computes or is forecast: the rule, whose intervals :meth:`_reach` sets."""
        schedule = self.preset.schedule
        if step < schedule.warmup or step >= len(self.course.coordinates) - schedule.cooldown:
            return StepMode.FULL
        return StepMode.UPDATE if step >= min(self._following.values(), default=0) else StepMode.DISPATCH

    def best_order(self, errors: dict[float, float]) -> float:
        """Return the degree whose error lets the next forecasts reach farthest.

        High degrees win where outputs are smooth. Low degrees win where rounding noise dominates, which high degrees
        amplify. Of two degrees that reach about as far the higher is chosen, because its error falls faster near the
        record. A fractional degree counts as the next higher one.

        Args:
            errors: ‖F − F̂‖ / ‖F‖ of the forecast of each degree.
        """
        reaches = {
            order: (self.target_error / error) ** (1 / (math.ceil(order) + 1)) if error else math.inf
            for order, error in errors.items()
            if not math.isnan(error)
        }
        farthest = max(reaches.values(), default=math.nan)
        best = [order for order, reach in reaches.items() if reach >= ABOUT * farthest]
        return max(best, key=lambda order: (math.ceil(order), reaches[order]), default=max(errors))

    def observe(
        self,
        step: int,
        nodes: Sequence[float],
        order: float,
        error: float,
        course: Course | None = None,
        outputs: object = None,
    ) -> int:
        """Set the next computed step from a measured forecast error; the outputs that reach least far decide.

        A branch that computes alone, because its records are missing or too old, replaces its own decision only: the
        forecasts of the other branches reach no farther.

        Args:
            step: the computed step at which the error was measured.
            nodes: coordinates of the records, newest first; empty = there was no forecast.
            order: degree of the forecast, which used ``⌈order⌉ + 1`` records.
            error: ‖F − F̂‖ / ‖F‖.
            course: course of the output; None = the run's.
            outputs: key of the branch and its output.

        Returns:
            The next computed step for this error alone.
        """
        course = course or self.course
        following = self._reach(step, nodes, order, error, course) if nodes else step + 1
        self._following[outputs] = following
        return following

    def _reach(self, step: int, nodes: Sequence[float], order: float, error: float, course: Course) -> int:
        """Return the step after the longest gap whose expected errors stay within the target."""
        end = len(course.coordinates)
        most, interval, counted = self._most(step, step - course.coordinates.index(nodes[0])), 1, 0.0
        while interval < most and step + interval < end:
            expected = self.expected_error(step, step + interval, nodes, order, error, course)
            counted += course.weights[step + interval] * expected
            # `not … <=`, so that a NaN error keeps the interval at 1.
            if not counted <= self.target_error:
                break
            interval += 1
        following = step + interval
        if following >= course.lasting and not UNREPAIRED * counted <= self.target_error:
            following = max(course.lasting - 1, step + 1)
        return following

    def _most(self, step: int, latest: int) -> int:
        """Return the longest interval from a step, after the latest one."""
        return min(self.preset.schedule.max_interval, WIDENING * latest)

    def expected_error(
        self, step: int, later: int, nodes: Sequence[float], order: float, error: float, course: Course
    ) -> float:
        """Return the error to expect of a forecast at a later step; see :meth:`observe` for the arguments."""
        coordinates, used = course.coordinates, math.ceil(order) + 1
        bends = course.bends or [1.0] * len(coordinates)
        here, there = coordinates[step], coordinates[later]
        remainder = bends[step] * math.prod(abs(here - node) for node in nodes[:used])
        ahead = bends[later] * math.prod(abs(there - node) for node in [here, *nodes][:used])
        return error * ahead / remainder if remainder else math.inf


class ClosedLoop:
    """Forecast and correct the outputs of some samples in one branch.

    A forecast step calls :meth:`forecast`. A computed step calls :meth:`observe` with its output, which starts the
    measurement, and :meth:`decide` with the measured numbers once the host has them.

    Args:
        gap: gap of these samples, shared by the branches of their transformer.
        order: highest degree of forecasts; the memory plan has room for its values.
        rows: the samples' places in the batch; None = the whole batch.
        course: course of the outputs; None = the gap's.

    Attributes:
        decider: name of the output that decided, if outputs are decided separately.
    """

    decider: str | None = None

    def __init__(self, gap: Gap, order: int, rows: Rows = None, course: Course | None = None) -> None:
        self.gap = gap
        self.rows = rows
        self.course = course or gap.course
        self.following = 0  # next computed step, as these outputs decided it
        self.order: float = order  # current degree of forecasts
        self.damped: float | None = None  # share of the slope that fitted the newest output; None = unknown or 1
        self.outputs = History(order + 1)
        self.computed_step = -1  # latest computed step of this branch
        self.forecast_steps: list[int] = []  # forecast steps since then
        self.measured: Sequence[torch.Tensor] = ()  # errors measured at the newest output, on the device
        self._tested: tuple[tuple[float, ...], list[float], bool] = ((), [], False)  # nodes, degrees, damps
        self._weights: dict[tuple[int, float], list[float]] = {}  # of the records, by step and degree of a forecast

    @property
    def records_outputs(self) -> bool:
        """Return True if outputs are recorded. Always true here: forecasts are compared with them."""
        return True

    def mode(self, step: int, blocks_ready: bool = True) -> StepMode:
        """Return the step's mode; a branch that can't forecast yet computes.

        Args:
            blocks_ready: blocks have the records that a DISPATCH step needs; read at levels other than output.
        """
        mode = self.gap.mode(step, id(self))
        ready = bool(self.outputs.coordinates) if self.gap.preset.forecast.level == "output" else blocks_ready
        # A branch that was not called then, for example with guidance off, has older records than the gap assumes.
        stale = self.computed_step < self.gap.computed_step
        return StepMode.UPDATE if mode is StepMode.DISPATCH and (stale or not ready) else mode

    def forecast(self, step: int) -> Output:
        """Return the forecast output of a step, in new tensors."""
        self.forecast_steps.append(step)
        weights = self._weights.get((step, self.order)) or self._weights_at(step, self.order)
        return tuple([weighted_sum(parts, weights) for parts in zip(*self.outputs.records, strict=True)])

    def observe(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        """Correct the output of a computed step, measure the forecast error and record the output.

        Args:
            used: selects the tokens of an output tensor that the pipeline uses.

        Returns:
            The corrected output, with which the pipeline continues.
        """
        if self._has_another_shape(output):
            self.restart()
        corrected, output = self.correct(step, output)
        self.measured = self.judge(step, output, used)
        if self.records_outputs:
            # A copy, because pipelines may change the transformer's output in place.
            self.outputs.record(self.course.coordinates[step], tuple(part.detach().clone() for part in output))
            self._weights = {}
        return corrected

    def _has_another_shape(self, output: Output) -> bool:
        """Return True if an output has another shape than the records, which then can't forecast it."""
        newest = self.outputs.values[0] if len(self.outputs) else output
        return [part.shape for part in output] != [part.shape for part in newest]

    def restart(self) -> None:
        """Drop the records and the list of forecast steps."""
        self.outputs.clear()
        self.forecast_steps, self.damped, self._weights = [], None, {}

    def correct(self, step: int, output: Output) -> tuple[Output, Output]:
        """Correct a computed output for the errors of the forecasts before it.

        Returns:
            The output with which the pipeline continues, and the output that the right latents would have given.
        """
        steps, self.forecast_steps = self.forecast_steps, []
        settings, course = self.gap.preset.forecast, self.course
        if not settings.corrector or not steps or course.moves is None:
            return output, output
        now, end = course.moves[step], course.moves[-1]
        most = max(abs(later[step]) for later in course.moves[step + 1 :])
        if abs(end[step]) <= LEAST_LASTING * most:
            return output, output
        response = course.responses[step] if course.responses is not None else 0.0
        parts = list(zip(output, *self.outputs.values, strict=True))

        def plus_missed(shares: Sequence[float]) -> Output:
            forecasts = [(course.coordinates[earlier], share) for earlier, share in zip(steps, shares, strict=True)]
            nodes, here = self.outputs.coordinates, course.coordinates[step]
            weights = missed_weights(settings.method, nodes, self.order, here, forecasts, course.places())
            return tuple(weighted_sum(tensors, [1.0 + weights[0], *weights[1:]]) for tensors in parts)

        answer = [response * now[earlier] for earlier in steps]
        whole = [share + end[earlier] / end[step] for share, earlier in zip(answer, steps, strict=True)]
        return plus_missed(whole), plus_missed(answer) if response else output

    def judge(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        """Measure the error of each degree's forecast of ``output``, and the share of the slope that fits it best.

        Returns:
            Numbers for :meth:`decide`, float32 ``[]`` each, on the device.
        """
        history, here = self.outputs, self.course.coordinates[step]
        damps = self.gap.damps and history.order > 0
        orders: list[float] = list(range(min(1, history.order), history.order + 1)) if len(history) else []
        if damps and self.damped is not None:
            orders.append(self.damped)
        measured, damped = [], []
        for order in orders:
            predicted = forecast(self.gap.preset.forecast.method, history, here, order)
            parts = [relative_error(used(a), used(b)) for a, b in zip(output, predicted, strict=True)]
            measured.append(torch.stack(parts).max())  # unlike Python's max, it propagates NaN
            if damps and order == 1:
                damped = [best_share(*(map(used, parts) for parts in (output, history.values[0], predicted)))]
        self._tested = history.coordinates, orders, bool(damped)
        return [*measured, *damped]

    def decide(self, step: int, measured: Sequence[float]) -> float | None:
        """Set the degree of forecasts and, with the other branches, the next computed step.

        Args:
            measured: the numbers of :meth:`judge`, on the host.

        Returns:
            The error of the chosen degree; None = no forecast was possible.
        """
        nodes, orders, damps = self._tested
        errors = dict(zip(orders, measured, strict=False))
        # A branch's first output has no forecast to compare with.
        order: float = 0
        error = math.inf
        if errors:
            order = self.gap.best_order(errors)
            error = errors[order]
            self.go_on_with(order)
        if damps:
            self.refit(measured[-1])
        self.following = self.gap.observe(step, nodes, order, error, self.course, id(self))
        gap = range(step + 1, self.following) if len(self.outputs) else ()
        self._weights = {(later, self.order): self._weights_at(later, self.order) for later in gap}
        return error if errors else None

    def go_on_with(self, best: float) -> None:
        """Set the degree of forecasts to the best one; if that is a whole number, add the preset's ``beyond``."""
        beyond = self.gap.preset.forecast.beyond
        self.order = min(best + beyond, self.outputs.order) if best == int(best) else best

    def refit(self, share: float) -> None:
        """Record the share of the slope that fitted best; damped forecasts continue with it."""
        fitted = min(max(share, NO_SLOPE), 1.0) if math.isfinite(share) else None
        if self.order == self.damped and fitted is not None:
            self.order = fitted
        self.damped = fitted if fitted != 1.0 else None

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors on the device."""
        return self.outputs.tensors()

    def adopt(self, order: int) -> None:
        """Change the highest degree of forecasts."""
        self.outputs.shorten(order + 1)
        self.order, self._weights = min(self.order, order), {}

    def _weights_at(self, step: int, order: float) -> list[float]:
        """Return the weights of the records in a forecast of this degree at a step."""
        method = self.gap.preset.forecast.method
        return forecast_weights(method, self.outputs.coordinates, self.course.coordinates[step], order)
