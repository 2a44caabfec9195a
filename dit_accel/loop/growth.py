"""What an error of a step's output does to the result of the run, and what an error of the latents does to an output.

A step adds ``Δσ · F`` to the latents, so that an error of its output moves them by ``|Δσ|`` times the error. From there
on the model answers to it: where little of the image is settled yet, a small shift of the latents is a small step
towards another image, and grows. Along the directions in which forecasts err it has grown by about

    ``A(σ) = (1 − σ)^(−p)``

at the end of the run, with 1 − σ the share of the image in the latents at noise level σ. So an error counts by what it
does to the result, ``|Δσ| · A`` at the end of its step. Likewise a shift δ of the latents changes the output at once,
by about ``J δ`` with ``J = −r / (1 − σ)``: at r = 1 the model would keep the noise that it sees in the latents and put
all of the shift down to the image, at r = 0 it would take no notice.

And outputs bend more as noise goes, by about ``σ^(−q)``, since the last steps settle the finest details: so an error
that was measured at one noise level says too little of forecasts at a lower one.

docs/reference/concepts.md says more, docs/notes/loop.md what was measured and how p, r and q were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

GROWTH = 0.75  # p
RESPONSE = 0.5  # r
BEND = 0.75  # q
SCALES = (1.0, math.pi / 2, 1000.0)  # of flows' noise levels, of angles atan σ, and of timesteps where neither is known
LEAST_SHARE = 1e-3  # of the image, and of noise, that any latents count for


def error_weights(sigmas: Sequence[float]) -> list[float]:
    """What an error of every step's output counts, 1 on average.

    Args:
        sigmas: noise levels of a run, one a step, as :class:`~dit_accel.loop.tracker.Tick` has them; the last step
            ends at 0.
    """
    effects = [abs(noise - end) * max(1 - end, LEAST_SHARE) ** -GROWTH for noise, end in pairwise(_levels(sigmas))]
    mean = sum(effects) / len(effects)
    return [effect / mean for effect in effects] if mean else [1.0] * len(sigmas)


def responses(sigmas: Sequence[float]) -> list[float]:
    """J of every step: what a shift of the latents adds to its output.

    Args:
        sigmas: as for :func:`error_weights`. Where they rise, the model's output points the other way, and J with it.
    """
    response = math.copysign(RESPONSE, sigmas[-1] - sigmas[0])
    return [response / max(1 - noise, LEAST_SHARE) for noise in _levels(sigmas)[:-1]]


def bends(sigmas: Sequence[float]) -> list[float]:
    """How much outputs bend at every step, beside each other.

    Args:
        sigmas: as for :func:`error_weights`.
    """
    return [max(noise, LEAST_SHARE) ** -BEND for noise in _levels(sigmas)[:-1]]


def _levels(sigmas: Sequence[float]) -> list[float]:
    """Noise levels 1 to 0 before each step and, at last, after the run; some schedules run from 0 to 1 instead."""
    largest = max(map(abs, sigmas))
    scale = next((scale for scale in SCALES if largest <= 1.001 * scale), largest)
    levels = [min(abs(sigma) / scale, 1.0) for sigma in sigmas]
    return [*([1 - level for level in levels] if levels[-1] > levels[0] else levels), 0.0]
