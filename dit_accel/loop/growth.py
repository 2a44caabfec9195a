"""Estimate the effect of an output error on the result of the run, and of a latents error on an output.

A step adds ``Δσ · F`` to the latents, so an error of its output moves them by ``|Δσ|`` times the error. Later steps
amplify this shift: while little of the image is settled, a small shift of the latents leads to another image. Along the
directions of forecast errors, the shift has grown at the end of the run by about

    ``A(σ) = (1 − σ)^(−p)``

with 1 − σ the share of the image in the latents at noise level σ. So the weight of an error is its effect on the
result, ``|Δσ| · A`` at the end of its step.

A shift δ of the latents also changes the output at once, by about ``J δ`` with ``J = −r / (1 − σ)``. At r = 1 the model
would keep its estimate of the noise and attribute the whole shift to the image; at r = 0 its output would not change.

Outputs bend more at lower noise, by about ``σ^(−q)``, because the last steps settle the finest details. So an error
that was measured at one noise level underestimates the error at a lower one.

Outputs also change faster at the start than any polynomial in steps or in σ. In the log-odds of the noise level, whose
steps are long there and at the end, the outputs between two computed steps lie close to a polynomial through computed
ones, and video models' outputs continue best.

docs/reference/concepts.md has more; docs/notes/loop.md has the measurements and the choice of the constants.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from dit_accel.loop.moves import Moves

GROWTH = 0.75  # p
RESPONSE = 0.5  # r
BEND = 0.75  # q
SCALES = (1.0, 1000.0)  # largest noise level, largest timestep
LEAST_SHARE = 1e-3  # lower bound on the share of the image, and of noise, in the latents
LEAST_ODDS = 0.1  # added to both shares; 0.02 loses where steps are dense near pure noise


def error_weights(sigmas: Sequence[float]) -> list[float]:
    """Return the weight of an output error at every step, 1 on average.

    Args:
        sigmas: noise levels of a run, one a step, as in :class:`~dit_accel.loop.tracker.Tick`; the last step ends at 0.
    """
    effects = [abs(noise - end) * max(1 - end, LEAST_SHARE) ** -GROWTH for noise, end in pairwise(_levels(sigmas))]
    mean = sum(effects) / len(effects)
    return [effect / mean for effect in effects] if mean else [1.0] * len(sigmas)


def responses(sigmas: Sequence[float], moves: Moves | None = None) -> list[float]:
    """Return J of every step: the change of its output per shift of the latents.

    Args:
        moves: moves of the run. Outputs that point to the image instead of the noise (Mochi, MiniMax-H3) have positive
            moves, and then J is positive. None = unknown, so that J is not used.
    """
    response = math.copysign(RESPONSE, sum(moves[-1])) if moves else -RESPONSE
    return [response / max(1 - noise, LEAST_SHARE) for noise in _levels(sigmas)[:-1]]


def bends(sigmas: Sequence[float]) -> list[float]:
    """Return the bend of the outputs at every step, relative to the other steps."""
    return [max(noise, LEAST_SHARE) ** -BEND for noise in _levels(sigmas)[:-1]]


def log_odds(sigmas: Sequence[float]) -> list[float] | None:
    """Return ``log((σ + c) / (1 − σ + c))`` of every step, c = LEAST_ODDS; None if two steps have the same."""
    found = [math.log((noise + LEAST_ODDS) / (1 - noise + LEAST_ODDS)) for noise in _levels(sigmas)[:-1]]
    return found if len(set(found)) == len(found) else None


def _levels(sigmas: Sequence[float]) -> list[float]:
    """Return noise levels from 1 to 0, before each step and after the run; schedules from 0 to 1 are reversed."""
    largest = max(map(abs, sigmas))
    scale = next((scale for scale in SCALES if largest <= 1.001 * scale), largest)
    levels = [min(abs(sigma) / scale, 1.0) for sigma in sigmas]
    return [*([1 - level for level in levels] if levels[-1] > levels[0] else levels), 0.0]
