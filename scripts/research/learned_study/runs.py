"""Plain runs of a demo model, and the closed loop's forecasts on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dit_accel.loop.closed_loop import INTERPOLATED, ClosedLoop, Course, Gap
from dit_accel.loop.forecast import forecast_weights
from dit_accel.loop.growth import bends, error_weights
from dit_accel.loop.tracker import Tick
from dit_accel.pipeline import preset_for
from dit_accel.presets import Preset
from scripts.research.conditions_study.cells import Conditions

GAPS = (1, 2, 3)
RECORDS = 3  # newest records that a learned forecast reads; a correction reads the output after the gap too
DIFFERENCES = ("output", "slope", "bend", "twist")  # of successive records
CORRECTED = ("corrected, first", "corrected")  # groups of corrections


@dataclass(frozen=True)
class Run:
    """Plain run of prompts, whose branches of guidance count as samples.

    Args:
        inputs, outputs: latents that the transformer gets, and its output, ``[samples, C, frames, H, W]``, one a step.
            The branches of a prompt follow each other.
        branches: number of branches.
        course: course of the run, without moves, because records of a plain run need no correction.
        sigmas: noise levels, one a step.
    """

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    branches: int
    course: Course
    preset: Preset
    sigmas: Sequence[float]

    def features(self, at: Sequence[int], target: int, samples: slice) -> dict[str, torch.Tensor]:
        """Return the features of a forecast or correction from the records of some steps, newest first.

        A correction is the output of a step before the newest record. It reads the latents before the gap, because
        those after it are the sum of the very outputs that it estimates.
        """
        records = [self.outputs[step][samples] for step in at]
        latents = self.inputs[at[0] if target > at[0] else at[1]][samples]
        return features(records, latents, self.polynomial(at, target))

    def polynomial(self, at: Sequence[int], target: int) -> list[float]:
        """Return the weights of the records in the polynomial to which a learned forecast or correction adds."""
        coordinates = [self.course.coordinates[step] for step in at]
        order = 1 if target > at[0] else INTERPOLATED
        return forecast_weights("newton", coordinates, self.course.coordinates[target], min(order, len(at) - 1))


def features(
    records: Sequence[torch.Tensor], latents: torch.Tensor, weights: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Return the features of a learned forecast by name, float32 ``[n, C, frames, H, W]``.

    Args:
        records: recorded outputs, newest first.
        latents: latents at a record.
        weights: weights of the polynomial, which is the feature ``polynomial``.
    """
    values = [record.float() for record in records]
    made = sum(weight * value for weight, value in zip(weights, values, strict=True))
    found = {"latents": latents.float(), "polynomial": torch.as_tensor(made)}
    for name in DIFFERENCES[: len(records)]:
        found[name] = values[0]
        values = [newer - older for newer, older in pairwise(values)]
    return found


@dataclass(frozen=True)
class Case:
    """A forecast from the records of a run, or the correction of a forecast.

    Args:
        group: ``first`` where a run begins, ``dense`` with records of successive steps, ``steady`` where the records
            lie as far apart as the forecast reaches, as in a run of the loop. Corrections are :data:`CORRECTED`.
        at: steps of the records, newest first.
        target: step of the output that is forecast or corrected.
        gap: steps from the record before to the target; of a correction, number of forecast steps.
        loop: the loop's forecast or correction of the tested samples, float32 ``[n, C, frames, H, W]``.
    """

    run: Run
    group: str
    at: tuple[int, ...]
    target: int
    gap: int
    loop: torch.Tensor

    @property
    def weight(self) -> float:
        """Weight with which the loop counts the error."""
        return self.run.course.weights[self.target]


def record(conditions: Conditions, prompts: Sequence[Any], steps: int) -> Run:
    """Run prompts in one batch of so many steps."""
    pipe = conditions.pipe
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(_: Any, __: Any, given: dict[str, Any], output: Any) -> None:
        calls.append((unpacked(given["hidden_states"]), unpacked(output[0])))

    handle = pipe.transformer.register_forward_hook(note, with_kwargs=True)
    conditions.arguments["num_inference_steps"] = steps
    try:
        conditions.run(prompts)
    finally:
        handle.remove()
    preset = preset_for(pipe, "balanced")
    sigmas = pipe.scheduler.sigmas[:steps].tolist()
    coordinates = Tick(None, 0, steps, sigmas, sigmas).coordinates(preset.forecast.coordinate)
    course = Course(coordinates, error_weights(sigmas), bends=bends(sigmas))
    branches = len(calls) // steps
    inputs, outputs = (
        [torch.stack(parts[first : first + branches], dim=1).flatten(0, 1) for first in range(0, len(parts), branches)]
        for parts in zip(*calls, strict=True)
    )
    return Run(inputs, outputs, branches, course, preset, sigmas)


def unpacked(tokens: torch.Tensor) -> torch.Tensor:
    """Return a copy ``[N, C, frames, H, W]`` of latents, which FLUX packs two by two into tokens ``[N, T, 4 C]``."""
    if tokens.ndim == 5:
        return tokens.clone()
    side = math.isqrt(tokens.shape[1])
    parts = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (side, side))  # [N, y, x, C, 2, 2]
    return parts.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3).unsqueeze(2).contiguous()


def packed_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values of :func:`unpacked` in the shape and dtype of the transformer's output."""
    if like.ndim == 3:
        parts = values[:, :, 0].unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [N, C, y, 2, x, 2]
        values = parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return values.to(like.dtype)


def cases(run: Run, tested: slice, most: int) -> Iterator[Case]:
    """Yield forecasts from at most so many steps of a run, of every group and gap."""
    steps = len(run.outputs)
    chosen = {0, 1, *range(2, steps, max(1, math.ceil((steps - 2) / most)))}
    for spacing in range(1, max(GAPS) + 2):
        for first in range(spacing):
            loops = [ClosedLoop(Gap(run.preset, run.course), run.preset.forecast.order) for _ in run.outputs[0][tested]]
            for at in range(first, steps - 1, spacing):
                advance(loops, at, run.outputs[at][tested])
                for gap in GAPS:
                    group = group_of(spacing, at, gap)
                    if group is not None and at in chosen and at + gap < steps:
                        made = torch.cat([loop.forecast(at + gap)[0] for loop in loops])
                        yield Case(run, group, tuple(range(at, -1, -spacing))[:RECORDS], at + gap, gap, made.float())


def corrections(run: Run, tested: slice, most: int) -> Iterator[Case]:
    """Yield corrections of the forecasts in a run's first gap, and in at most so many later ones of every length."""
    steps = len(run.outputs)
    for gap in GAPS:
        ends = range(2 * gap + 2, steps, max(1, math.ceil((steps - 2) / most)))
        later = [tuple(range(end, -1, -gap - 1))[: RECORDS + 1] for end in ends]
        for group, places in ((CORRECTED[0], [(gap + 2, 1, 0)] if gap + 2 < steps else []), (CORRECTED[1], later)):
            for at in places:
                for target in range(at[1] + 1, at[0]):
                    made = run.features(at, target, tested)["polynomial"]
                    yield Case(run, group, at, target, gap, made)


def group_of(spacing: int, at: int, gap: int) -> str | None:
    """Return the group of a forecast; None = the loop forecasts nothing from such records."""
    if spacing == 1 and at <= 1:
        return "first"
    if spacing == 1 and gap == 1:
        return "dense"
    return "steady" if spacing == gap + 1 and at >= spacing else None


def advance(loops: Sequence[ClosedLoop], step: int, outputs: torch.Tensor) -> None:
    """Let each sample's loop observe its output, with one host synchronisation."""
    for loop, output in zip(loops, outputs.split(1), strict=True):
        loop.observe(step, (output,), lambda part: part)
    numbers = [number for loop in loops for number in loop.measured]
    values = iter(torch.stack(numbers).tolist() if numbers else [])
    for loop in loops:
        loop.decide(step, [next(values) for _ in loop.measured])


def errors(forecast: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return ``‖F − F̂‖ / ‖F‖`` of each sample; leading dimensions before the samples stay."""
    return (forecast - target).flatten(-4).norm(dim=-1) / target.flatten(-4).norm(dim=-1)
