"""Moves: the factor of each output in the latents, for linear schedulers (Euler, UniPC, DPM-Solver++, DEIS).

After each step the latents are a weighted sum of the first latents and the model's outputs so far. The weights depend
on the schedule alone. With Euler's steps the weight of an output is the change of sigma in its own step. Multistep
schedulers read an output again in later steps, and UniPC repeats its last step once the next output is known, so at
first an output moves the latents by up to twice as much as at the end. The weights are therefore measured: a copy of
the scheduler runs once, on the CPU, over latents with one entry a step, whose output is 1 in that step and 0 in all
others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from dit_accel.errors import UnsupportedError

Moves = Sequence[Sequence[float]]  # [n][k]: factor of step k's output in the latents after n steps
TOLERANCE = 1e-4  # relative error of the mixture; float32 rounding gives 1e-6, clipping gives tenths
Sampler = Callable[[Callable[[torch.Tensor, float], torch.Tensor], torch.Tensor], torch.Tensor]


def euler_moves(sigmas: Sequence[float]) -> Moves:
    """Return the moves of Euler's steps.

    Args:
        sigmas: noise levels before each step and after the last.
    """
    changes = [after - before for before, after in pairwise(sigmas)]
    return [changes[:step] + [0.0] * (len(changes) - step) for step in range(len(sigmas))]


def linear_moves(scheduler: Any, first: int = 0) -> Moves | None:
    """Return the moves of any linear scheduler, measured by a trial run of about one millisecond a step.

    Args:
        scheduler: a scheduler with diffusers' ``step(output, timestep, latents)``, at the start of a run. It is not
            changed, nor is torch's random state.
        first: index of the timestep at which the run begins, above 0 for image to image.

    Returns:
        The moves; None if the latents are no weighted sum of the outputs, because steps add noise or clip, or if
        ``step`` takes other arguments.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return _try_out(_on_cpu(copy.deepcopy(scheduler)), first)
    except Exception:  # a scheduler that fails here is not known to be linear
        return None


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

    with torch.random.fork_rng(devices=[]):
        last = sample(model, latents.float())
    if len(course) < len(outputs):
        raise UnsupportedError("it does not call the model at every step")
    moves = _moves_of([*course, last], factors)
    if moves is None:
        raise UnsupportedError("it draws noise in its steps, or does more than to add up the model's outputs")
    return moves


def _try_out(scheduler: Any, first: int) -> Moves | None:
    """Run ``scheduler`` to its end over the latents of a trial."""
    timesteps = scheduler.timesteps[first:]
    outputs, latents, factors = _trial(len(timesteps))
    course = [latents]
    for timestep, output in zip(timesteps, outputs, strict=True):
        course.append(scheduler.step(output, timestep, course[-1], return_dict=False)[0])
    return _moves_of(course, factors)


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
    found = torch.cat(list(course)).double()  # [steps + 1, steps + 2]
    parts, mixture = found[:, :-1], found[:, -1]
    # `<=`, so that NaN does not count as linear.
    linear = (mixture - parts @ factors).abs() <= TOLERANCE * (parts * factors).abs().sum(dim=1)
    return parts[:, :-1].tolist() if linear.all() else None


def _on_cpu(scheduler: Any) -> Any:
    for name, value in vars(scheduler).items():
        if isinstance(value, torch.Tensor):
            setattr(scheduler, name, value.cpu())
    return scheduler
