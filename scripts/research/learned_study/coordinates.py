"""Coordinates of the polynomials that need no fit: functions of the noise level that bend near pure noise.

Outputs move away from the first one by about ``(σ_0 − σ)^q`` with q below 1, so a polynomial in the step's index or in
sigma misses most there. These coordinates are steep where the noise level is near 1; two of them also near 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dit_accel.loop.closed_loop import INTERPOLATED
from dit_accel.loop.forecast import forecast_weights
from dit_accel.loop.growth import LEAST_ODDS

COORDINATES: dict[str, Callable[[float], float]] = {
    "arcsine": lambda noise: math.asin(math.sqrt(min(max(noise, 0.0), 1.0))),
    "logit": lambda noise: math.log((noise + LEAST_ODDS) / (1 - noise + LEAST_ODDS)),
    "power": lambda noise: max(1 - noise, 0.0) ** 0.4,
}
DEGREES = (1, 2)


class Curve:
    """Correction of a forecast by the parabola in a coordinate of the noise level."""

    def __init__(self, sigmas: Sequence[float], name: str) -> None:
        self._places = [COORDINATES[name](noise) for noise in sigmas]

    def weights(self, at: Sequence[int], target: int, degree: int) -> list[float]:
        """Return the weights of the records of some steps in the output of another step."""
        return forecast_weights("newton", [self._places[step] for step in at], self._places[target], degree)

    def output(self, at: Sequence[int], target: int, records: Sequence[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        """Return the output of a step, from the records of some steps."""
        weights = self.weights(at, target, min(INTERPOLATED, len(at) - 1))
        return torch.as_tensor(sum(weight * value.float() for weight, value in zip(weights, records, strict=True)))
