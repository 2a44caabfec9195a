"""Forecasts as weights over raw history: ``F̂(t) = Σ_m w_m(t) · F_m`` with ``Σ w_m = 1``.

The history holds features as they were computed, so there are no derivative tensors, and because the weights sum to
one a linear bias inside F needs no special case.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch


def newton_weights(coordinates: Sequence[float], target: float) -> list[float]:
    """Weights of the polynomial through the recorded values, in Lagrange's form.

    Exact for polynomials of degree ``len(coordinates) − 1`` on any spacing.

    Args:
        coordinates: where the values were recorded, newest first, all different.
        target: where the forecast is wanted.
    """
    return [math.prod((target - other) / (own - other) for other in coordinates if other != own) for own in coordinates]


def taylor_weights(coordinates: Sequence[float], target: float) -> list[float]:
    """Weights of TaylorSeer's forecast ``Σ_i Δ^i F · x^i / i!`` (TaylorSeer, equation 3), x the distance to the newest
    value.

    Each recorded value's i-th difference is divided by the gap before *that* record, as TaylorSeer does. Its
    differences are one-sided, so the forecast is not exact beyond first order.
    """
    count = len(coordinates)
    # differences[m][n]: weight of value n in the current difference at record m; order 0 is the value itself.
    differences = [[float(m == n) for n in range(count)] for m in range(count)]
    distance = target - coordinates[0]
    weights = [0.0] * count
    for order in range(count):
        factor = distance**order / math.factorial(order)
        weights = [weight + factor * term for weight, term in zip(weights, differences[0], strict=True)]
        differences = [
            [
                (newer - older) / (coordinates[m] - coordinates[m + 1])
                for newer, older in zip(differences[m], differences[m + 1], strict=True)
            ]
            for m in range(len(differences) - 1)
        ]
    return weights


def forecast_weights(method: str, coordinates: Sequence[float], target: float, order: int | None = None) -> list[float]:
    """Weights over history for a forecast at ``target``; one a coordinate, newest first, summing to one.

    Args:
        method: ``newton``, ``taylor`` or ``reuse``.
        coordinates: where the values were recorded, newest first.
        target: where the forecast is wanted.
        order: highest degree, beyond whose ``order + 1`` values the others weigh nothing; None = as the values allow.
    """
    count = 1 if method == "reuse" else len(coordinates) if order is None else order + 1
    used = coordinates[:count]
    weights = (taylor_weights if method == "taylor" else newton_weights)(used, target)
    return weights + [0.0] * (len(coordinates) - len(used))


class History:
    """The last ``order + 1`` values of one feature, which may consist of several tensors.

    Args:
        order: degree of the forecast that reads it.
    """

    def __init__(self, order: int) -> None:
        self._records: deque[tuple[float, tuple[torch.Tensor, ...]]] = deque(maxlen=order + 1)

    def __len__(self) -> int:
        return len(self._records)

    def record(self, coordinate: float, value: tuple[torch.Tensor, ...]) -> None:
        """Adds the value at ``coordinate`` and forgets the oldest beyond ``order + 1``."""
        self._records.appendleft((coordinate, value))

    @property
    def order(self) -> int:
        """Degree of the polynomial that the recorded values determine now."""
        return len(self._records) - 1

    @property
    def coordinates(self) -> tuple[float, ...]:
        """Newest first."""
        return tuple(coordinate for coordinate, _ in self._records)

    @property
    def values(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Newest first."""
        return tuple(value for _, value in self._records)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is kept alive."""
        return [tensor for value in self.values for tensor in value]
