"""The closed loop: a computed step tells how wrong forecasts are, decides when to compute next, and corrects itself.

The transformer's outputs F are known at the steps that were computed, at coordinates t (step indices or sigmas).
Between them the output is forecast, as the polynomial through the newest of them. At each computed step:

1. **Correct.** With F known here, the forecast steps before it lie between records, and the parabola through the
   nearest of these tells what their outputs would have been far better than the extrapolation did. The latents are
   off by ``δ = Σ_i m_i · (F̄_i − F̂_i)``, F̂ the forecasts, F̄ the interpolation and m_i how far the output of step i has
   moved the latents (:mod:`dit_accel.loop.moves`). At the right latents the output would have been ``F + J δ`` (J:
   :mod:`dit_accel.loop.growth`); that is what is recorded, and the pipeline goes on with ``F + J δ + δ' / m'``: δ' and
   m', the move of this step's own output, are those that last to the end of the run.
2. **Judge.** A forecast of F from the records before it costs no step: its error ``e = ‖F − F̂‖ / ‖F‖`` is measured for
   every degree, and (damping) for the share of the slope that would have fitted best one computed step before.
3. **Decide.** A polynomial of degree D through the outputs at D + 1 nodes errs by
   ``F^(D+1) / (D+1)! · Π_k (t − t_k)`` (remainder of interpolation). The error e tells the first factor; the forecasts
   to come have this step as a node and lack the oldest, so that at step n they err by
   ``e_n = e · b_n / b · Π_k |t_n − t'_k| / Π_k |t − t_k|``, b how much outputs bend there. The degree that reaches
   farthest is gone on with, and the next computed step comes after the largest 1 <= n <= max_interval with
   ``Σ_(i<n) w_i · e_i <= target_error``, w_i what an error counts i steps from here (w and b:
   :mod:`dit_accel.loop.growth`). Nothing corrects a gap that would reach the end of the run: it has to be within the
   target by UNREPAIRED, or else the last step is computed.

A :class:`ClosedLoop` does this for the samples of a batch that are decided together, in one branch of classifier-free
guidance. Branches share a :class:`Gap`: all of them compute in the same steps, and the worst one decides which.
:class:`~dit_accel.loop.interval.IntervalLoop` is the plain sibling, which computes on an interval and measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dit_accel.kernels import weighted_sum
from dit_accel.loop.forecast import History, forecast, forecast_weights
from dit_accel.loop.moves import Moves
from dit_accel.loop.rows import Rows
from dit_accel.loop.storage import PLAIN
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset

ABOUT = 0.9  # of the farthest reach counts as far; 1.0 and 0.8 measured 1 dB lower at equal work on the demo model
INTERPOLATED = 2  # degree between records; 3 measured 0.2 dB lower in the mean of 16 cells, up to 0.7 dB for videos
LEAST_LASTING = 0.1  # share of an output's farthest move that lasts, or the correction would be far too large meanwhile
UNREPAIRED = 2.0  # times the error that counts where no computed step follows, and all of it stays
NO_SLOPE = 2.0**-20  # above 0, so that a forecast which follows none of the slope counts as one that might

Output = tuple[torch.Tensor, ...]  # the tensors of a transformer's output, batch first


@dataclass(frozen=True)
class Course:
    """A run's steps as the loop sees them; each has an entry a step.

    Args:
        coordinates: what forecasts run over: step indices or sigmas.
        weights: what an error of the step's output counts.
        moves: how far outputs move the latents, in an entry a step and one for the end of the run; None = that is not
            known, and nothing can be corrected.
        responses: what a shift of the latents adds to the step's output; None = nothing.
        bends: how much outputs bend at the step, beside other steps; None = alike.
    """

    coordinates: Sequence[float]
    weights: Sequence[float]
    moves: Moves | None = None
    responses: Sequence[float] | None = None
    bends: Sequence[float] | None = None


class Gap:
    """When some samples compute next, in all branches of one transformer.

    Args:
        preset: of the run.
        course: of the run.
    """

    def __init__(self, preset: Preset, course: Course) -> None:
        self.preset = preset
        self.course = course
        self.target_error = preset.schedule.target_error or 0.0  # an interval has none
        self.computed_step = -1  # the latest that was decided to compute
        self._decided: tuple[int, StepMode] | None = None
        self._observed_step = -1
        self._next_update = 0

    def mode(self, step: int) -> StepMode:
        """The step's mode, decided when a branch first asks."""
        if self._decided is None or self._decided[0] != step:
            self._decided = step, self.decide_mode(step)
            if self._decided[1] is not StepMode.DISPATCH:
                self.computed_step = step
        return self._decided[1]

    def decide_mode(self, step: int) -> StepMode:
        schedule = self.preset.schedule
        if step < schedule.warmup or step >= len(self.course.coordinates) - schedule.cooldown:
            return StepMode.FULL
        return StepMode.UPDATE if step >= self._next_update else StepMode.DISPATCH

    def best_order(self, errors: dict[float, float]) -> float:
        """The degree to go on with: the one whose error lets the next forecasts reach farthest.

        High degrees win where outputs are smooth and low ones where rounding noise dominates, which high ones amplify.
        Of two that reach about as far the higher is taken, for its error falls faster towards the record. A degree
        between two counts as the higher.

        Args:
            errors: ‖F − F̂‖ / ‖F‖ that a forecast of each degree would have had.
        """
        reaches = {
            order: (self.target_error / error) ** (1 / (math.ceil(order) + 1)) if error else math.inf
            for order, error in errors.items()
            if not math.isnan(error)
        }
        farthest = max(reaches.values(), default=math.nan)
        best = [order for order, reach in reaches.items() if reach >= ABOUT * farthest]
        return max(best, key=lambda order: (math.ceil(order), reaches[order]), default=max(errors))

    def observe(self, step: int, nodes: Sequence[float], order: float, error: float) -> None:
        """Takes the error of one forecast, measured at a computed step; of several at one step, the worst decides.

        Args:
            step: where it was measured.
            nodes: coordinates of the records, newest first; none = there was no forecast.
            order: degree of the forecast, which used ``⌈order⌉ + 1`` of them.
            error: ‖F − F̂‖ / ‖F‖.
        """
        schedule, coordinates = self.preset.schedule, self.course.coordinates
        bends = self.course.bends or [1.0] * len(coordinates)
        here, end = coordinates[step], len(coordinates)
        used = math.ceil(order) + 1
        remainder = bends[step] * math.prod(abs(here - node) for node in nodes[:used]) if nodes else 0.0
        ahead = [here, *nodes][:used]
        interval, counted = 1, 0.0
        while interval < schedule.max_interval and step + interval < end:
            there = bends[step + interval] * math.prod(abs(coordinates[step + interval] - node) for node in ahead)
            expected = error * there / remainder if remainder else math.inf
            counted += self.course.weights[step + interval] * expected
            # Written so that an error that is not a number keeps the interval at 1.
            if not counted <= self.target_error:
                break
            interval += 1
        following = step + interval
        if following == end and not UNREPAIRED * counted <= self.target_error:
            following = max(end - 1, step + 1)
        self._next_update = following if step != self._observed_step else min(self._next_update, following)
        self._observed_step = step


class ClosedLoop:
    """The loop of some samples in one branch: what it remembers of their outputs, and what it makes of it.

    A forecast step calls :meth:`forecast`; a computed one calls :meth:`observe` with its output, and :meth:`decide`
    with the numbers that this measured once the host has them.

    Args:
        gap: of these samples, shared by the branches of their transformer.
        order: highest degree of forecasts, for whose values there is memory.
        rows: the samples' places in the batch; None = all of it.
    """

    def __init__(self, gap: Gap, order: int, rows: Rows = None) -> None:
        self.gap = gap
        self.rows = rows
        self.order: float = order  # degree of forecasts at present
        self.damped: float | None = None  # share of the slope that fitted the newest output; None = unknown, or all
        self.outputs = History(order + 1)
        self.computed_step = -1  # the latest of this branch
        self.forecast_steps: list[int] = []  # those since then
        self.measured: Sequence[torch.Tensor] = ()  # what the newest output told, on the device
        self._judged: tuple[tuple[float, ...], list[float], bool] = ((), [], False)  # nodes, degrees, damps

    @property
    def records_outputs(self) -> bool:
        """Whether outputs are remembered: here always, for forecasts are judged by them."""
        return True

    def mode(self, step: int, blocks_ready: bool = True) -> StepMode:
        """The step's mode; a branch that can't forecast yet computes.

        Args:
            blocks_ready: whether blocks remember what a DISPATCH step needs, where they and not the output do.
        """
        mode = self.gap.mode(step)
        ready = len(self.outputs) > 0 if self.gap.preset.forecast.level == "output" else blocks_ready
        # A branch that was not called then, as where guidance was off, has older records than the gap was chosen for.
        stale = self.computed_step < self.gap.computed_step
        return StepMode.UPDATE if mode is StepMode.DISPATCH and (stale or not ready) else mode

    def forecast(self, step: int) -> Output:
        """The output of a step that is not computed; each of its tensors a new one."""
        self.forecast_steps.append(step)
        return self._forecast(self.gap.course.coordinates[step], self.order)

    def observe(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        """Takes the output of a computed step, judges forecasts by it and records it.

        Args:
            used: selects the tokens of an output tensor that the pipeline uses.

        Returns:
            The corrected output, with which the pipeline is to go on.
        """
        if self._has_another_shape(output):
            self.restart()
        corrected, output = self.correct(step, output)
        self.measured = self.judge(step, output, used)
        if self.records_outputs:
            # A copy, because pipelines may change the transformer's output in place.
            self.outputs.record(self.gap.course.coordinates[step], tuple(part.detach().clone() for part in output))
        return corrected

    def _has_another_shape(self, output: Output) -> bool:
        """Whether an output has another shape than the records, which therefore tell nothing of it."""
        newest = self.outputs.values[0] if len(self.outputs) else output
        return [part.shape for part in output] != [part.shape for part in newest]

    def restart(self) -> None:
        """Forgets the records, and that forecasts were made from them."""
        self.outputs.clear()
        self.forecast_steps, self.damped = [], None

    def correct(self, step: int, output: Output) -> tuple[Output, Output]:
        """Makes good what the forecasts before a computed step missed.

        Returns:
            What the pipeline is to go on with, and what the output would have been without those misses.
        """
        steps, self.forecast_steps = self.forecast_steps, []
        settings, course = self.gap.preset.forecast, self.gap.course
        if not settings.corrector or not steps or course.moves is None:
            return output, output
        now, end = course.moves[step], course.moves[-1]
        most = max(abs(later[step]) for later in course.moves[step + 1 :])
        if abs(end[step]) <= LEAST_LASTING * most:
            return output, output
        response = course.responses[step] if course.responses is not None else 0.0
        parts = list(zip(output, *self.outputs.values, strict=True))

        def plus_missed(shares: Sequence[float]) -> Output:
            forecasts = [(course.coordinates[each], share) for each, share in zip(steps, shares, strict=True)]
            weights = missed_weights(
                settings.method, self.outputs.coordinates, self.order, course.coordinates[step], forecasts
            )
            return tuple(weighted_sum(each, [1.0 + weights[0], *weights[1:]]) for each in parts)

        answer = [response * now[each] for each in steps]
        whole = [share + end[each] / end[step] for share, each in zip(answer, steps, strict=True)]
        return plus_missed(whole), plus_missed(answer) if response else output

    def judge(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        """What each degree's forecast of ``output`` would have missed, and what share of the slope fits it best.

        Returns:
            float32 ``[]`` each, on the device, for :meth:`decide`.
        """
        history, here = self.outputs, self.gap.course.coordinates[step]
        damps = self.gap.preset.forecast.damping and history.order > 0
        orders: list[float] = list(range(min(1, history.order), history.order + 1)) if len(history) else []
        if damps and self.damped is not None:
            orders.append(self.damped)
        measured, damped = [], []
        for order in orders:
            predicted = self._forecast(here, order)
            parts = [relative_error(used(a), used(b)) for a, b in zip(output, predicted, strict=True)]
            measured.append(torch.stack(parts).max())  # unlike Python's max, it lets what is no number through
            if damps and order == 1:
                damped = [best_share(*(map(used, parts) for parts in (output, history.values[0], predicted)))]
        self._judged = history.coordinates, orders, bool(damped)
        return [*measured, *damped]

    def decide(self, step: int, measured: Sequence[float]) -> float | None:
        """Sets the degree of forecasts and, with the other branches, the next computed step.

        Args:
            measured: what :meth:`judge` gave, on the host.

        Returns:
            The error that counts; None where there was nothing to judge.
        """
        nodes, orders, damps = self._judged
        errors = dict(zip(orders, measured, strict=False))
        # A branch's first output judges nothing, so the next step is computed too.
        order: float = 0
        error = math.inf
        if errors:
            order = self.gap.best_order(errors)
            error = errors[order]
            self.go_on_with(order)
        if damps:
            self.refit(measured[-1])
        self.gap.observe(step, nodes, order, error)
        return error if errors else None

    def go_on_with(self, judged: float) -> None:
        """Forecasts are of the degree that was judged best and, where it is a whole one, go ``beyond`` it."""
        beyond = self.gap.preset.forecast.beyond
        self.order = min(judged + beyond, self.outputs.order) if judged == int(judged) else judged

    def refit(self, share: float) -> None:
        """Takes the share of the slope that would have fitted best; damped forecasts go on with it."""
        fitted = min(max(share, NO_SLOPE), 1.0) if math.isfinite(share) else None
        if self.order == self.damped and fitted is not None:
            self.order = fitted
        self.damped = fitted if fitted != 1.0 else None

    def adopt(self, order: int) -> None:
        """Goes on with forecasts of another highest degree."""
        self.outputs.adopt(order + 1, PLAIN)
        self.order = min(self.order, order)

    def _forecast(self, coordinate: float, order: float) -> Output:
        return forecast(self.gap.preset.forecast.method, self.outputs, coordinate, order)


def missed_weights(
    method: str,
    coordinates: Sequence[float],
    order: float,
    here: float,
    forecasts: Sequence[tuple[float, float]],
) -> list[float]:
    """What forecasts missed, ``Σ_i a_i · (F̄_i − F̂_i)``, as weights over the computed output and the records.

    Args:
        method, order: of the forecasts.
        coordinates: of the records that they used, newest first.
        here: where the output was computed.
        forecasts: coordinate of each, and its factor ``a_i``.

    Returns:
        Weights of the output and then the records; they sum to zero.
    """
    weights = [0.0] * (1 + len(coordinates))
    for coordinate, share in forecasts:
        better = forecast_weights("newton", [here, *coordinates], coordinate, INTERPOLATED)
        made = [0.0, *forecast_weights(method, coordinates, coordinate, order)]
        weights = [weight + share * (b - m) for weight, b, m in zip(weights, better, made, strict=True)]
    return weights


def relative_error(value: torch.Tensor, forecast: torch.Tensor) -> torch.Tensor:
    """``‖F − F̂‖ / ‖F‖`` of the worst sample, float32 ``[]``; 0 where both norms are 0."""
    value, forecast = value.float().flatten(1), forecast.float().flatten(1)
    missed = (value - forecast).norm(dim=1)
    return torch.where(missed == 0, missed, missed / value.norm(dim=1)).max()


def best_share(
    output: Iterable[torch.Tensor], newest: Iterable[torch.Tensor], linear: Iterable[torch.Tensor]
) -> torch.Tensor:
    """The s by which ``newest + s · (linear − newest)`` comes nearest to the output, over all its tensors together."""
    along, square = [], []
    for value, last, predicted in zip(output, newest, linear, strict=True):
        slope = (predicted.float() - last.float()).flatten()
        along.append(torch.dot((value.float() - last.float()).flatten(), slope))
        square.append(torch.dot(slope, slope))
    return sum(along[1:], along[0]) / sum(square[1:], square[0])
