"""Moves: the factor of each output in the latents, for linear schedulers (Euler, UniPC, DPM-Solver++, DEIS).

After each step the latents are a weighted sum of the first latents and the model's outputs so far. The weights depend
on the schedule alone. With Euler's steps the weight of an output is the change of sigma in its own step. Multistep
schedulers read an output again in later steps, and UniPC repeats its last step once the next output is known, so at
first an output moves the latents by up to twice as much as at the end. The weights are therefore measured: a copy of
the scheduler runs once, on the CPU, over latents with one entry a step, whose output is 1 in that step and 0 in all
others. Further entries get zeros, so that they show the noise that steps add, and what is left without it is linear.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from dit_accel.errors import UnsupportedError
from dit_accel.loop.copies import copied

Moves = Sequence[Sequence[float]]  # [n][k]: factor of step k's output in the latents after n steps
TOLERANCE = 1e-4  # relative error of the mixture; float32 rounding gives 1e-6, clipping gives tenths
ZEROS = 4096  # entries of zeros in a trial: the noise that a step adds to them is measured within 1%
RANKS = (2, 3, 4, 5)  # of latents: some schedulers take one shape alone
Sampler = Callable[[Callable[[torch.Tensor, float], torch.Tensor], torch.Tensor], torch.Tensor]


class SchedulerTrial(NamedTuple):
    """Steps of a scheduler as a trial run shows them."""

    # moves of the outputs; None = the latents are no weighted sum of them, or the steps can't be tried
    moves: Moves | None = None
    noise: float = 0.0  # share of the latents' noise that a step draws anew, on average; 0 = steps add no noise


def try_out(scheduler: Any, first: int = 0) -> SchedulerTrial:
    """Return the moves and the noise of a scheduler's steps, by a trial run of about one millisecond a step.

    Args:
        scheduler: a scheduler with diffusers' ``step(output, timestep, latents)``, at the start of a run. It is not
            changed, nor is the random state of torch, NumPy or Python. If its ``step`` can't be called that way, the
            ``step`` of a base class counts.
        first: index of the timestep at which the run begins, above 0 for image to image.
    """
    of_bases = [vars(cls).get("step") for cls in type(scheduler).__mro__]
    steps = [scheduler.step, *(MethodType(step, scheduler) for step in of_bases if step is not None)]
    for step, rank in product(steps, RANKS):
        with suppress(Exception):  # the step takes other arguments, or latents of another rank
            return _try_out(scheduler, step, first, rank)
    return SchedulerTrial()


def sampler_moves(sample: Sampler, sigmas: Sequence[float]) -> Moves:
    """Return the moves of a sampler that calls its model itself, measured by a trial run.

    Args:
        sample: runs the sampler to its end. It takes a model and latents float32 ``[1, N]``, and returns the last
            latents. The model takes latents and their noise level, and returns the denoised latents; its output is the
            slope ``(latents − denoised) / σ``.
        sigmas: noise levels before each step and after the last.

    Raises:
        UnsupportedError: the model is called at other noise levels or more than once a step, or the latents are no
            weighted sum of its outputs. Errors of the sampler propagate.
    """
    outputs, latents, factors = _trial(len(sigmas) - 1)
    course: list[torch.Tensor] = []

    def model(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        step = len(course)
        if step == len(outputs) or not math.isclose(sigma, sigmas[step], rel_tol=TOLERANCE):
            raise UnsupportedError("it calls the model more than once a step, or at noise levels between the steps")
        course.append(latents)
        return latents - sigma * outputs[step].float()

    with torch.random.fork_rng(devices=[], device_type="cpu"):
        last = sample(model, latents.float())
    if len(course) < len(outputs):
        raise UnsupportedError("it does not call the model at every step")
    if (moves := _moves_of([*course, last], factors)) is None:
        raise UnsupportedError("it draws noise in its steps, or does more than to add up the model's outputs")
    return moves


def _try_out(scheduler: Any, step: Callable, first: int, rank: int) -> SchedulerTrial:
    """Run a ``step`` of the scheduler to its end over latents ``[1, N, …]`` of this rank.

    Entries of zeros stay zeros under a linear scheduler. If they do not, the steps add something: a second trial
    subtracts it step by step, with another copy of the scheduler that gets zeros alone and the same random numbers.
    Random states, which all threads share, are set only if the steps may have drawn numbers.
    """
    timesteps = scheduler.timesteps[first:].cpu()
    outputs, latents, factors = _trial(len(timesteps))
    outputs, latents = pad(outputs, (0, ZEROS)), pad(latents, (0, ZEROS))
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    adds, noise = True, 0.0
    try:
        course, _ = _course([_Stepper(scheduler, step, rank)], timesteps, outputs, latents)
        adds = len(course) <= len(timesteps) or bool(course[-1][:, -ZEROS:].any())
        if adds:
            course, added = _course([_Stepper(scheduler, step, rank) for _ in range(2)], timesteps, outputs, latents)
            noise, level = map(sum, zip((0.0, 0.0), *added, strict=True))
            noise /= max(level, TOLERANCE)
    finally:
        if adds:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
    moves = _moves_of(course, factors) if len(course) > len(timesteps) else None
    return SchedulerTrial(moves, noise if noise > TOLERANCE else 0.0)


def _course(
    steppers: Sequence[_Stepper], timesteps: torch.Tensor, outputs: torch.Tensor, latents: torch.Tensor
) -> tuple[list[torch.Tensor], list[tuple[float, float]]]:
    """Return the latents before each step and after the last, and the noise that each step but the last adds.

    The second copy of the scheduler, if any, gets zeros, to be subtracted. Only an error in the first step is raised.
    """
    course = [latents]
    added: list[tuple[float, float]] = []
    for index, (timestep, output) in enumerate(zip(timesteps, outputs, strict=True)):
        stepped = []
        for stepper, share in zip(steppers, (1.0, 0.0), strict=False):
            if len(steppers) > 1:
                torch.default_generator.manual_seed(index)
                np.random.seed(index)
                random.seed(index)
            try:
                stepped.append(stepper(share * output, timestep, share * course[-1]))
            except Exception:
                if index == 0:
                    raise
                return course, added
        course.append(stepped[0] - stepped[1] if len(stepped) > 1 else stepped[0])
        if len(stepped) > 1 and index + 1 < len(timesteps):
            added.append(steppers[1].noise(stepped[1], len(timesteps) - index - 1))
    return course, added


class _Stepper:
    """A ``step`` on a copy of a scheduler, over latents of some rank."""

    def __init__(self, scheduler: Any, step: Callable, rank: int) -> None:
        known: dict[int, Any] = {}
        self._scheduler, self._rank = copied(scheduler, known), rank
        self._step = copied(step, known)
        if self._scheduler is scheduler:
            raise UnsupportedError("a scheduler can't be tried out that can't be copied")

    def __call__(self, output: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        shape = (*latents.shape, *[1] * (self._rank - latents.ndim))
        if hasattr(self._scheduler, "scale_model_input"):  # some schedulers warn otherwise
            self._scheduler.scale_model_input(latents.view(shape), timestep)
        return self._step(output.view(shape), timestep, latents.view(shape), return_dict=False)[0].view_as(latents)

    def noise(self, stepped: torch.Tensor, left: int) -> tuple[float, float]:
        """Return the standard deviations of new and of all noise in latents, as far as known, ``left`` steps ahead."""
        noise = level = float(stepped.std())
        with suppress(Exception):
            zero, one, step = torch.zeros(1, 1), torch.ones(1, 1), len(self._scheduler.timesteps) - left
            timestep = self._scheduler.timesteps[step, None]
            if hasattr(self._scheduler, "scale_noise"):
                level = float(self._scheduler.scale_noise(zero, timestep, one))
            elif hasattr(self._scheduler, "add_noise"):
                level = float(self._scheduler.add_noise(zero, one, timestep))
            else:
                level = float(self._scheduler.sigmas[step])
        return noise, level


def _trial(steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs ``[steps, 1, steps + 2]`` of a trial, first latents ``[1, steps + 2]``, and the mixture's factors.

    Two entries after those of the steps test the linearity: one has first latents and no outputs, the other is a
    mixture of all entries, with large factors because some schedulers clip large values.
    """
    factors = torch.tensor([(-1) ** step * (100.0 + step) for step in range(steps + 1)], dtype=torch.float64)
    outputs = torch.zeros(steps, 1, steps + 2, dtype=torch.float64)
    outputs[:, 0, :steps] = torch.eye(steps)
    outputs[:, 0, -1] = factors[:steps]
    latents = torch.zeros(1, steps + 2, dtype=torch.float64)
    latents[0, -2:] = torch.tensor([1.0, factors[-1]])
    return outputs, latents, factors


def _moves_of(course: Sequence[torch.Tensor], factors: torch.Tensor) -> Moves | None:
    """Return the moves from a trial's latents, before each step and after the last; None = not linear."""
    found = torch.cat(list(course)).double()[:, : len(factors) + 1]  # [steps + 1, steps + 2]
    parts, mixture = found[:, :-1], found[:, -1]
    # `<=`, so that NaN does not count as linear.
    linear = (mixture - parts @ factors).abs() <= TOLERANCE * (parts * factors).abs().sum(dim=1)
    return parts[:, :-1].tolist() if linear.all() else None
