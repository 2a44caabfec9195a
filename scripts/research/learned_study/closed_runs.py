"""Closed loops with a learned forecast as one more degree, which the measured errors choose or reject."""

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
from scripts.research.learned_study.fits import Model
from scripts.research.learned_study.runs import RECORDS, Run, features, packed_like, unpacked

MARK = 2.0**-10  # a degree of D - MARK is the learned forecast, whose error grows like that of degree D


class Learned:
    """Learned forecast, fitted to calibration runs when a place of records and target occurs first.

    Attributes:
        latents: latents that the transformer gets in the present step.
    """

    def __init__(self, run: Run, model: Model, strength: float) -> None:
        self._run, self._model, self._strength = run, model, strength
        self._weights: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
        self.latents = torch.empty(0)

    def note(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        """Record the latents of a transformer call."""
        self.latents = given["hidden_states"]

    def forecast(
        self, at: tuple[int, ...], target: int, records: Sequence[torch.Tensor], latents: torch.Tensor
    ) -> torch.Tensor:
        """Return the forecast of an output, from the records of some steps and the latents at the newest."""
        if (at, target) not in self._weights:
            self._weights[at, target] = self._model.fit(self._run, at, target, slice(None), [self._strength])
        values = [unpacked(record) for record in records]
        found = features(values, unpacked(latents), self._run.linear(at, target))
        return packed_like(self._model.forecast(found, self._weights[at, target])[0], records[0])


class LearnedLoop(ClosedLoop):
    """Closed loop that also measures and chooses the learned forecast.

    Attributes:
        learned: the learned forecast.
        degree: degree that the error of the learned forecast grows like.
    """

    learned: Learned
    degree = 2

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._latents: deque[torch.Tensor] = deque(maxlen=RECORDS)  # at the records, newest first
        self._made: list[tuple[int, Output]] = []  # forecasts since the newest record

    def observe(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        corrected = super().observe(step, output, used)
        latents = self.learned.latents
        self._latents.appendleft(latents.clone() if self.rows is None else take_rows(latents, self.rows))
        return corrected

    def restart(self) -> None:
        super().restart()
        self._latents.clear()
        self._made = []

    def forecast(self, step: int) -> Output:
        made = super().forecast(step)
        self._made.append((step, made))
        return made

    def judge(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        measured = list(super().judge(step, output, used))
        nodes, orders, damps = self._tested
        if nodes:
            order = min(self.outputs.order, self.degree) - MARK
            predicted = self._forecast(self.course.coordinates[step], order)
            measured.insert(len(orders), relative_error(used(output[0]), used(predicted[0])))
            self._tested = nodes, [*orders, order], damps
        return measured

    def correct(self, step: int, output: Output) -> tuple[Output, Output]:
        """Correct as usual, with the forecasts that were made in place of the polynomial's."""
        made, self._made = self._made, []
        moves, responses = self.course.moves, self.course.responses
        if not made or not is_learned(self.order) or moves is None or responses is None:
            return super().correct(step, output)
        self.forecast_steps = []
        coordinates = self.course.coordinates
        values = [output[0], *(value[0] for value in self.outputs.values)]
        shift, at_once = (
            torch.zeros_like(output[0], dtype=torch.float32),
            torch.zeros_like(output[0], dtype=torch.float32),
        )
        for each, (forecast, *_) in made:
            nodes = [coordinates[step], *self.outputs.coordinates]
            weights = forecast_weights("newton", nodes, coordinates[each], INTERPOLATED)
            missed = (
                sum(weight * value.float() for weight, value in zip(weights, values, strict=True)) - forecast.float()
            )
            shift += moves[-1][each] / moves[-1][step] * missed
            at_once += responses[step] * moves[step][each] * missed
        right = output[0].float() + at_once
        return ((right + shift).to(output[0].dtype),), (right.to(output[0].dtype),)

    def _forecast(self, coordinate: float, order: float) -> Output:
        if not is_learned(order):
            return super()._forecast(coordinate, order)
        place = list(self.course.coordinates).index
        at = tuple(place(each) for each in self.outputs.coordinates)
        records = [value[0] for value in self.outputs.values]
        return (self.learned.forecast(at, place(coordinate), records, self._latents[0]),)


def is_learned(order: float) -> bool:
    """Return True if a degree stands for the learned forecast."""
    return math.isclose(order + MARK, round(order + MARK), abs_tol=MARK / 4) and order != round(order)


@contextmanager
def learned_loop(pipe: Any, learned: Learned, degree: int, target_error: float) -> Iterator[None]:
    """Accelerate a pipeline by `balanced` with the learned forecast."""
    loop = type("FittedLoop", (LearnedLoop,), {"learned": learned, "degree": degree})
    handle = pipe.transformer.register_forward_pre_hook(learned.note, with_kwargs=True)
    try:
        with Variant(loop=loop).in_use(), accelerated(pipe, "balanced", target_error=target_error, per_prompt=True):
            yield
    finally:
        handle.remove()
