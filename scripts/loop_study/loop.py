"""The closed loop once more, on one page and with more knobs than the package has, so that an idea costs a line.

With the knobs as they are by default it computes the same steps as the package (a test holds this).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from dit_accel.loop.forecast import newton_weights
from dit_accel.loop.tracker import ABOUT

KEPT = 6  # records, enough for every predictor here


@dataclass(frozen=True)
class Predictor:
    """How a forecast is made.

    Args:
        order: degree of the polynomial.
        coordinate: that it runs over, step or sigma.
        quantity: that it goes through: output, F; clean, the picture ``x − σF`` that the output points at; noise,
            ``x + (1 − σ)F``; scaled, ``σF``.
        extra: records beyond order + 1, to which it is fitted by least squares.
        damped: of what the degree adds to the one below it follows the share that fitted the output before best.
    """

    order: int
    coordinate: str = "step"
    quantity: str = "output"
    extra: int = 0
    damped: bool = False


@dataclass(frozen=True)
class Variant:
    """The loop's knobs; the defaults are the loop as it is.

    Args:
        target_error, error_in, warmup, max_interval, cooldown: as in a preset; error_in farthest: the error of the
            farthest forecast alone counts.
        predictors: a computed step goes on with the one that would have reached farthest.
        growth: how an error grows with the distance. power: ``(d / g) ** (D + 1)``; product: as the
            remainder of a polynomial through the recorded nodes; fitted: the power that two gaps show.
        norm: of errors: mean (root mean square over everything), token:q (the q-quantile of tokens), power:p.
        end: gaps are at most the steps that remain over this; 0 = no bound.
        ratio: a gap is at most the one before times this; 0 = no bound.
        span: target times the share of sigma that is left, to this power.
        amplified: errors count as those grow that were made at ``σ``: by ``(1 − σ)`` to minus this power.
        steady: errors are at least this share of what the error at the computed step before lets expect.
        hindsight: damped forecasts are judged by the output that they are fitted to.
        rate: the target is what a gap may add for each mean step of sigma that it covers.
        carry: what a gap left of its allowance goes to the next, this share of it.
        late: an error is known one step late; the step after a computed one is forecast unseen.
        blend: of the two best predictors, the mix that would have been best, by its least-squares share in 0..this.
        beyond: share of what the next degree adds, up to the highest, that forecasts add.
        repay: share of what the forecasts since the last computed step missed, judged by interpolation, that the
            output of a computed step makes good.
        repay_degree: of that interpolation, as far as records go.
    """

    target_error: float
    error_in: str = "output"
    warmup: int = 2
    max_interval: int = 16
    cooldown: int = 1
    predictors: tuple[Predictor, ...] = (Predictor(0), Predictor(1), Predictor(2))
    growth: str = "product"
    norm: str = "mean"
    end: float = 0.0
    ratio: float = 0.0
    span: float = 0.0
    amplified: float = 0.0
    steady: float = 0.0
    hindsight: bool = False
    rate: bool = False
    carry: float = 0.0
    late: bool = False
    blend: float = 0.0
    beyond: float = 0.0
    repay: float = 1.0
    repay_degree: int = 3


@dataclass(frozen=True)
class Record:
    step: int
    output: torch.Tensor
    latents: torch.Tensor


class Branch:
    """What one stream of guidance remembers."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.predictor: Predictor | None = None
        self.second: tuple[Predictor, float] | None = None
        self.forecasts: list[tuple[int, torch.Tensor]] = []
        self.power: float | None = None
        self.shares: dict[Predictor, float] = {}
        self.derivatives: dict[Predictor, float] = {}


class Loop:
    """Stands in for a transformer's forward: runs it, or forecasts its output.

    Args:
        forward: of the transformer.
        scheduler: of its pipeline, which predicts a flow by Euler steps.
        variant: the knobs.
    """

    def __init__(self, forward: Callable, scheduler: Any, variant: Variant) -> None:
        self._forward = forward
        self._scheduler = scheduler
        self._variant = variant
        self.computed: list[int] = []
        self._step = -1
        self._next_update = 0
        self._saved = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        step = self._scheduler.step_index or 0
        if step != self._step:
            self._start_step(step)
        branch = self._branches.setdefault(self._calls, Branch())
        self._calls += 1
        latents = kwargs["hidden_states"]
        if not self._computes:
            output = self._forecast(branch, step, latents)
            branch.forecasts.append((step, output))
            return (output,)
        output = self._forward(*args, **kwargs)[0]
        result = self._observe(branch, Record(step, output.clone(), latents.clone()))
        return (result,)

    @property
    def fraction(self) -> float:
        return len(self.computed) / self._steps

    def _start_step(self, step: int) -> None:
        variant = self._variant
        if step == 0:
            self._branches: dict[int, Branch] = {}
            self._steps = len(self._scheduler.timesteps)
            self._sigmas = [float(sigma) for sigma in self._scheduler.sigmas]
            spans = [abs(after - before) for before, after in pairwise(self._sigmas)]
            inner = [*spans[:-1], spans[-2]]  # as the package has it, where the last step's end is not seen
            middles = [(before + after) / 2 for before, after in pairwise(self._sigmas)]
            moves = [span / (1 - middle) ** variant.amplified for span, middle in zip(inner, middles, strict=True)]
            self._shares = [move * self._steps / sum(moves) for move in moves]
            self._weights = self._shares if variant.error_in == "latents" else [1.0] * self._steps
            self._coordinates = {"step": [float(index) for index in range(self._steps)], "sigma": self._sigmas[:-1]}
        self._step, self._calls = step, 0
        full = step < variant.warmup or step >= self._steps - variant.cooldown
        self._computes = full or step >= self._next_update
        if self._computes:
            self._observed = False
            self.computed.append(step)

    def _forecast(self, branch: Branch, step: int, latents: torch.Tensor) -> torch.Tensor:
        output = self._damped(branch, branch.predictor, step, latents)
        if branch.second is not None:
            other, share = branch.second
            output = (1 - share) * output + share * self._predict(other, branch.records, step, latents)
        highest = min(max(p.order for p in self._variant.predictors), len(branch.records) - 1)
        if self._variant.beyond and not branch.predictor.damped and branch.predictor.order < highest:
            above = replace(branch.predictor, order=branch.predictor.order + 1)
            output = torch.lerp(output, self._predict(above, branch.records, step, latents), self._variant.beyond)
        return output

    def _damped(self, branch: Branch, predictor: Predictor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """A forecast, of which a damped predictor follows its share."""
        full = self._predict(predictor, branch.records, step, latents)
        if not predictor.damped:
            return full
        below = replace(predictor, order=predictor.order - 1)
        return torch.lerp(self._predict(below, branch.records, step, latents), full, branch.shares[predictor])

    def _fit(self, branch: Branch, record: Record) -> None:
        """Finds every damped predictor's share, by the newest output."""
        for predictor in self._variant.predictors:
            if predictor.damped and predictor.order < len(branch.records):
                below = replace(predictor, order=predictor.order - 1)
                low, high = (self._predict(p, branch.records, record.step, record.latents) for p in (below, predictor))
                slope = high - low
                if slope.any():
                    share = float(((record.output - low) * slope).sum() / slope.square().sum())
                    branch.shares[predictor] = min(max(share, 0.0), 1.0)

    def _predict(
        self, predictor: Predictor, records: Sequence[Record], step: int, latents: torch.Tensor
    ) -> torch.Tensor:
        """A forecast of the output at ``step``, where the latents are known."""
        used = list(records)[: predictor.order + 1 + predictor.extra]
        coordinates = self._coordinates[predictor.coordinate]
        nodes = [coordinates[record.step] for record in used]
        if len(used) > predictor.order + 1:
            powers = np.vander(np.array(nodes) - coordinates[step], predictor.order + 1, increasing=True)
            weights = np.linalg.pinv(powers)[0].tolist()
        else:
            weights = newton_weights(nodes, coordinates[step])
        values = (self._quantity(predictor, record.output, record.latents, record.step) for record in used)
        value = sum(weight * each for weight, each in zip(weights, values, strict=True))
        sigma = self._sigmas[step]
        match predictor.quantity:
            case "clean":
                return (latents - value) / sigma
            case "noise":
                return (value - latents) / max(1 - sigma, 1e-6)
            case "scaled":
                return value / sigma
        return value

    def _quantity(self, predictor: Predictor, output: torch.Tensor, latents: torch.Tensor, step: int) -> torch.Tensor:
        sigma = self._sigmas[step]
        match predictor.quantity:
            case "clean":
                return latents - sigma * output
            case "noise":
                return latents + (1 - sigma) * output
            case "scaled":
                return sigma * output
        return output

    def _observe(self, branch: Branch, record: Record) -> torch.Tensor:
        """Judges the forecasts that there would have been, sets the next update and gives the output to go on with."""
        variant, step = self._variant, record.step
        usable = [p for p in variant.predictors if p.order < len(branch.records)]
        if len(branch.records) > 1:
            usable = [p for p in usable if p.order > 0] or usable
        if variant.hindsight:
            self._fit(branch, record)
        usable = [p for p in usable if not p.damped or p in branch.shares]
        following = step + 1
        if usable:
            forecasts = {p: self._damped(branch, p, step, record.latents) for p in usable}
            errors = {p: self._error(record.output, forecast) for p, forecast in forecasts.items()}
            errors = {p: self._steadied(p, error, branch, step) for p, error in errors.items()}
            chosen = branch.predictor = self._best(errors, branch, step)
            error = errors[chosen]
            branch.second = None
            if variant.blend and len(usable) > 1:
                other = max((p for p in usable if p is not chosen), key=lambda p: p.order)
                difference = forecasts[other] - forecasts[chosen]
                share = ((record.output - forecasts[chosen]) * difference).sum() / difference.square().sum()
                share = min(max(float(share), 0.0), variant.blend)
                mixed = forecasts[chosen] + share * difference
                branch.second, error = (other, share), self._error(record.output, mixed)
            if variant.growth == "fitted" and len(branch.records) > chosen.order + 1:
                branch.power = self._fitted_power(chosen, error, branch, record)
            following = self._reach(chosen, error, branch, step)
        if not variant.hindsight:
            self._fit(branch, record)
        self._next_update = min(self._next_update, following) if self._observed else following
        self._observed = True
        if variant.late and usable:
            self._next_update = max(self._next_update, step + 2)
        branch.records.appendleft(record)
        result = self._repaid(branch, record) if variant.repay and branch.forecasts else record.output
        branch.forecasts = []
        return result

    def _fitted_power(self, predictor: Predictor, error: float, branch: Branch, record: Record) -> float:
        """Of the error's growth from the newest record to the one before, from which the same forecast missed more."""
        earlier = self._predict(predictor, list(branch.records)[1:], record.step, record.latents)
        nodes = [self._coordinates[predictor.coordinate][each.step] for each in branch.records]
        here = self._coordinates[predictor.coordinate][record.step]
        farther = abs(here - nodes[1]) / abs(here - nodes[0])
        power = math.log(max(self._error(record.output, earlier) / error, 1e-3)) / math.log(farther)
        return min(max(power, 0.5), predictor.order + 2.0)

    def _error(self, value: torch.Tensor, forecast: torch.Tensor) -> float:
        kind, _, parameter = self._variant.norm.partition(":")
        difference, value = (value - forecast).float(), value.float()
        if kind == "token":  # tokens are pixels of the latents where these are not packed
            dimension = -1 if value.ndim == 3 else 1
            worst = difference.norm(dim=dimension).flatten().quantile(float(parameter))
            return float(worst / value.norm(dim=dimension).square().mean().sqrt())
        power = float(parameter or 2)
        return float(difference.norm(power) / value.norm(power))

    def _steadied(self, predictor: Predictor, error: float, branch: Branch, step: int) -> float:
        """The error, or what the last one lets expect of this step, where chance made it much smaller."""
        remainder = math.prod(step - record.step for record in list(branch.records)[: predictor.order + 1])
        before = branch.derivatives.get(predictor, 0.0)
        branch.derivatives[predictor] = error / remainder
        return max(error, self._variant.steady * before * remainder)

    def _best(self, errors: dict[Predictor, float], branch: Branch, step: int) -> Predictor:
        """As the package chooses the order, or, where coordinates or quantities differ, by the interval they allow."""
        if len({replace(p, order=0, damped=False) for p in errors}) > 1:
            return max(errors, key=lambda p: self._smooth_reach(p, errors[p], branch, step))
        reaches = {p: (self._variant.target_error / max(e, 1e-12)) ** (1 / (p.order + 1)) for p, e in errors.items()}
        farthest = max(reaches.values())
        best = [p for p, reach in reaches.items() if reach >= ABOUT * farthest]
        return max(best, key=lambda p: (p.order, reaches[p]))

    def _smooth_reach(self, predictor: Predictor, error: float, branch: Branch, step: int) -> float:
        """Steps that a predictor reaches, and by what fraction of a step more."""
        counted = self._counted(predictor, error, branch, step)
        reach = 0.0
        last = 0.0
        for value in counted:
            if value > self._variant.target_error:
                return reach + (self._variant.target_error - last) / (value - last)
            reach, last = reach + 1, value
        return reach

    def _counted(self, predictor: Predictor, error: float, branch: Branch, step: int) -> Iterator[float]:
        """What forecasts up to the 1st, 2nd, … step from here count to, in the terms of the target."""
        total = share = 0.0
        for following in range(step + 1, self._steps):
            expected = error * self._growth(predictor, branch, step, following)
            if self._variant.error_in == "farthest":
                total = expected
            else:
                total += self._weights[following] * expected
            share += self._shares[following]
            yield total / share if self._variant.rate else total

    def _growth(self, predictor: Predictor, branch: Branch, step: int, following: int) -> float:
        coordinates = self._coordinates[predictor.coordinate]
        here, there = coordinates[step], coordinates[following]
        nodes = [coordinates[record.step] for record in branch.records]
        if self._variant.growth == "product":
            old = math.prod(abs(here - node) for node in nodes[: predictor.order + 1])
            return math.prod(abs(there - node) for node in [here, *nodes][: predictor.order + 1]) / old
        power = predictor.order + 1 if branch.power is None else branch.power
        return (abs(there - here) / abs(here - nodes[0])) ** power

    def _reach(self, predictor: Predictor, error: float, branch: Branch, step: int) -> int:
        variant = self._variant
        left = self._sigmas[step] / self._sigmas[0]
        target = variant.target_error * left**variant.span + self._saved * variant.carry
        interval, last = 1, 0.0
        bound = variant.max_interval
        if variant.ratio and branch.records:
            bound = min(bound, max(1, math.floor(variant.ratio * (step - branch.records[0].step))))
        if variant.end:
            bound = min(bound, max(1, math.ceil((self._steps - 1 - step) / variant.end)))
        for counted in self._counted(predictor, error, branch, step):
            if interval >= bound or not counted <= target:
                break
            interval, last = interval + 1, counted
        if variant.carry:
            self._saved = max(target - last, 0.0)
        return step + interval

    def _repaid(self, branch: Branch, record: Record) -> torch.Tensor:
        """The output, and with it what the forecasts since the last computed step were short of."""
        order = min(self._variant.repay_degree, len(branch.records) - 1)
        interpolation = replace(branch.predictor, order=order, quantity="output", extra=0)
        missed = 0.0
        for step, forecast in branch.forecasts:
            better = self._predict(interpolation, branch.records, step, record.latents)
            missed = missed + (self._sigmas[step + 1] - self._sigmas[step]) * (better - forecast)
        span = self._sigmas[record.step + 1] - self._sigmas[record.step]
        return record.output + self._variant.repay * missed / span


@contextmanager
def looped(pipe: Any, variant: Variant) -> Iterator[Loop]:
    """The pipeline's transformer runs in the loop, within."""
    loop = Loop(pipe.transformer.forward, pipe.scheduler, variant)
    pipe.transformer.forward = loop
    try:
        yield loop
    finally:
        del pipe.transformer.forward
