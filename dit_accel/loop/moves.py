"""How far outputs move the latents of a run, for schedulers whose steps are linear: Euler's, UniPC, DPM-Solver++, DEIS.

After each step the latents are a sum of those at the start and of the model's outputs so far, each times a number that
depends on the schedule alone. Under Euler's steps that number is how much sigma changes in the output's own step, from
there on. Multistep schedulers read an output again in later steps, and UniPC makes its last step anew once the next
output is known: at first an output moves the latents by up to twice as much as in the end. So the numbers are read off
the scheduler itself. A copy of it runs once, on the CPU, over latents with an entry for every step, whose output is 1
in that step and 0 in all others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from dit_accel.errors import UnsupportedError

Moves = Sequence[Sequence[float]]  # [n][k]: what the output of step k is multiplied with in the latents after n steps
TOLERANCE = 1e-4  # of a mixture; float32 leaves 1e-6 between the two ways to add up, and whatever clips leaves tenths
Sampler = Callable[[Callable[[torch.Tensor, float], torch.Tensor], torch.Tensor], torch.Tensor]


def euler_moves(sigmas: Sequence[float]) -> Moves:
    """Moves of Euler's steps.

    Args:
        sigmas: noise levels before each step and after the last.
    """
    changes = [after - before for before, after in pairwise(sigmas)]
    return [changes[:step] + [0.0] * (len(changes) - step) for step in range(len(sigmas))]


def linear_moves(scheduler: Any, first: int = 0) -> Moves | None:
    """Moves of any linear scheduler, found by a trial that takes about a millisecond a step.

    Args:
        scheduler: diffusers' or one with its ``step(output, timestep, latents)``, at the start of a run. It stays as it
            is, and so do torch's random numbers.
        first: index of the timestep that the run begins with, above 0 from image to image.

    Returns:
        None where the latents are no such sum: steps that draw noise or clip, a ``step`` that takes something else.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return _try_out(_on_cpu(copy.deepcopy(scheduler)), first)
    except Exception:  # whatever somebody's own scheduler runs into, it is then not known to be linear
        return None


def sampler_moves(sample: Sampler, sigmas: Sequence[float]) -> Moves:
    """Moves of a sampler that calls its model by itself, found by a trial likewise.

    Args:
        sample: runs the sampler to its end: called with a model and with latents float32 ``[1, N]``, it gives the last
            latents. The model takes latents and their noise level, and gives them without the noise; its output is the
            slope ``(latents − denoised) / σ``.
        sigmas: noise levels before each step and after the last.

    Raises:
        UnsupportedError: the model is called at other noise levels or more than once a step, or the latents are no sum
            of its outputs. Whatever the sampler raises comes out too.
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
        raise UnsupportedError("it draws noise as it goes, or does more than to add up what the model gives")
    return moves


def _try_out(scheduler: Any, first: int) -> Moves | None:
    """Runs ``scheduler`` to its end over the latents of a trial."""
    timesteps = scheduler.timesteps[first:]
    outputs, latents, factors = _trial(len(timesteps))
    course = [latents]
    for timestep, output in zip(timesteps, outputs, strict=True):
        course.append(scheduler.step(output, timestep, course[-1], return_dict=False)[0])
    return _moves_of(course, factors)


def _trial(steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs ``[steps, 1, steps + 2]`` of a trial, its first latents ``[1, steps + 2]``, and factors of its mixture.

    Behind the entries of the steps come two that tell whether things add up: one with latents at the start and no
    outputs, and a mixture of all the others, with factors that are large because some schedulers clip large values.
    """
    factors = torch.tensor([(-1) ** step * (100.0 + step) for step in range(steps + 1)], dtype=torch.float64)
    outputs = torch.zeros(steps, 1, steps + 2, dtype=torch.float64)
    outputs[:, 0, :steps] = torch.eye(steps)
    outputs[:, 0, -1] = factors[:steps]
    latents = torch.zeros(1, steps + 2, dtype=torch.float64)
    latents[0, -2:] = torch.tensor([1.0, factors[-1]])
    return outputs, latents, factors


def _moves_of(course: Sequence[torch.Tensor], factors: torch.Tensor) -> Moves | None:
    """Moves from the latents of a trial, before each step and after the last; None where they do not add up."""
    found = torch.cat(list(course)).double()  # [steps + 1, steps + 2]
    parts, mixture = found[:, :-1], found[:, -1]
    # Written so that what is not a number does not count as linear.
    linear = (mixture - parts @ factors).abs() <= TOLERANCE * (parts * factors).abs().sum(dim=1)
    return parts[:, :-1].tolist() if linear.all() else None


def _on_cpu(scheduler: Any) -> Any:
    for name, value in vars(scheduler).items():
        if isinstance(value, torch.Tensor):
            setattr(scheduler, name, value.cpu())
    return scheduler
