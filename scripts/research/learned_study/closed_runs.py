"""Closed loops with learned corrections, and a learned forecast as a degree that measured errors choose or reject."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dit_accel import accelerated
from dit_accel.loop.closed_loop import INTERPOLATED, ClosedLoop, Output, relative_error
from dit_accel.loop.forecast import forecast_weights
from dit_accel.loop.rows import take_rows
from scripts.research.few_steps_study.variants import Variant
from scripts.research.learned_study.coordinates import Curve
from scripts.research.learned_study.fits import Model
from scripts.research.learned_study.runs import RECORDS, Run, features, packed_like, unpacked

MARK = 2.0**-10  # a degree of D - MARK is the learned forecast, whose error grows like that of degree D
DEGREE = 2


class Learned:
    """Learned forecast or correction, fitted to calibration runs when a place of records and target occurs first."""

    def __init__(self, run: Run, model: Model, strength: float) -> None:
        self._run, self._model, self._strength = run, model, strength
        self._weights: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}

    def output(
        self, at: tuple[int, ...], target: int, records: Sequence[torch.Tensor], latents: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of a step, from the records of some steps and the latents at one of them."""
        if (at, target) not in self._weights:
            self._weights[at, target] = self._model.fit(self._run, at, target, slice(None), [self._strength])
        values = [unpacked(record) for record in records]
        found = features(values, unpacked(latents), self._run.polynomial(at, target))
        return packed_like(self._model.forecast(found, self._weights[at, target])[0], records[0])


class LearnedLoop(ClosedLoop):
    """Closed loop with learned forecasts, corrections or both.

    Attributes:
        forecasts: the learned forecast; None = only polynomials.
        corrections: the learned correction; None = only the parabola.
        latents: the latents of the present step, alone in a list.
    """

    forecasts: Learned | None = None
    corrections: Learned | Curve | None = None
    latents: list[torch.Tensor]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._known: deque[torch.Tensor] = deque(maxlen=RECORDS)  # latents at the records, newest first
        self._made: list[tuple[int, Output]] = []  # forecasts since the newest record

    def observe(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        corrected = super().observe(step, output, used)
        latents = self.latents[0]
        self._known.appendleft(latents.clone() if self.rows is None else take_rows(latents, self.rows))
        return corrected

    def restart(self) -> None:
        super().restart()
        self._known.clear()
        self._made = []

    def forecast(self, step: int) -> Output:
        made = super().forecast(step)
        self._made.append((step, made))
        return made

    def judge(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        measured = list(super().judge(step, output, used))
        nodes, orders, damps = self._tested
        if nodes and self.forecasts is not None:
            order = min(self.outputs.order, DEGREE) - MARK
            predicted = self._forecast(self.course.coordinates[step], order)
            measured.insert(len(orders), relative_error(used(output[0]), used(predicted[0])))
            self._tested = nodes, [*orders, order], damps
        return measured

    def correct(self, step: int, output: Output) -> tuple[Output, Output]:
        """Correct as usual, with the forecasts that were made and, if they are learned, with learned corrections."""
        made, self._made = self._made, []
        moves, responses = self.course.moves, self.course.responses
        if not made or moves is None or responses is None:
            return super().correct(step, output)
        self.forecast_steps = []
        shift, at_once = (torch.zeros_like(output[0], dtype=torch.float32) for _ in range(2))
        for each, (forecast, *_) in made:
            missed = self._better(step, output[0], each).float() - forecast.float()
            shift += moves[-1][each] / moves[-1][step] * missed
            at_once += responses[step] * moves[step][each] * missed
        right = output[0].float() + at_once
        return ((right + shift).to(output[0].dtype),), (right.to(output[0].dtype),)

    def _better(self, step: int, output: torch.Tensor, target: int) -> torch.Tensor:
        """Return the output of a forecast step, once the output of the step after the gap is known."""
        records = [output, *(value[0] for value in self.outputs.values)]
        if self.corrections is not None:
            return self.corrections.output((step, *self._steps()), target, records, self._known[0])
        places, coordinates = self.course.places(), self.course.coordinates
        nodes = [places[each] for each in (coordinates[step], *self.outputs.coordinates)]
        degree = INTERPOLATED if is_learned(self.order) else max(INTERPOLATED, self.order + 1)
        weights = forecast_weights("newton", nodes, places[coordinates[target]], degree)
        return torch.as_tensor(sum(weight * value.float() for weight, value in zip(weights, records, strict=True)))

    def _forecast(self, coordinate: float, order: float) -> Output:
        if self.forecasts is None or not is_learned(order):
            return super()._forecast(coordinate, order)
        records = [value[0] for value in self.outputs.values]
        target = list(self.course.coordinates).index(coordinate)
        return (self.forecasts.output(self._steps(), target, records, self._known[0]),)

    def _steps(self) -> tuple[int, ...]:
        """Return the steps of the records, newest first."""
        return tuple(map(list(self.course.coordinates).index, self.outputs.coordinates))


def is_learned(order: float) -> bool:
    """Return True if a degree stands for the learned forecast."""
    return math.isclose(order + MARK, round(order + MARK), abs_tol=MARK / 4) and order != round(order)


@contextmanager
def learned_loop(
    pipe: Any, forecasts: Learned | None, corrections: Learned | Curve | None, target_error: float
) -> Iterator[None]:
    """Accelerate a pipeline by `balanced` with learned forecasts, corrections or both."""
    latents = [torch.empty(0)]

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        latents[0] = given["hidden_states"]

    parts = {"forecasts": forecasts, "corrections": corrections, "latents": latents}
    handle = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        loop = type("FittedLoop", (LearnedLoop,), parts)
        with Variant(loop=loop).in_use(), accelerated(pipe, "balanced", target_error=target_error, per_prompt=True):
            yield
    finally:
        handle.remove()
