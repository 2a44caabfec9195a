"""Forecasts as weights over raw history: ``F̂(t) = Σ_m w_m(t) · F_m`` with ``Σ w_m = 1``.

The history holds features as they were computed, so there are no derivative tensors, and because the weights sum to
one a linear bias inside F needs no special case.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from dit_accel.kernels import weighted_sum
from dit_accel.loop.storage import PLAIN, Kept, Storage


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


def forecast_weights(
    method: str, coordinates: Sequence[float], target: float, order: float | None = None
) -> list[float]:
    """Weights over history for a forecast at ``target``; one a coordinate, newest first, summing to one.

    A degree between two takes that share of what the higher adds to the lower: degree 0.6 follows 0.6 of the slope.

    Args:
        method: ``newton``, ``taylor`` or ``reuse``.
        coordinates: where the values were recorded, newest first.
        target: where the forecast is wanted.
        order: highest degree, beyond whose ``order + 1`` values the others weigh nothing; None = as the values allow.
    """
    if order is not None and order != int(order):
        below = int(order)
        lower, upper = (forecast_weights(method, coordinates, target, whole) for whole in (below, below + 1))
        share = order - below
        return [(1 - share) * low + share * high for low, high in zip(lower, upper, strict=True)]
    count = 1 if method == "reuse" else len(coordinates) if order is None else int(order) + 1
    used = coordinates[:count]
    weights = (taylor_weights if method == "taylor" else newton_weights)(used, target)
    return weights + [0.0] * (len(coordinates) - len(used))


class History:
    """The newest values of one feature, which may consist of several tensors.

    Args:
        length: number of values that are kept; a forecast of degree D reads D + 1.
        storage: the form in which they are kept. Reading restores them, one history at a time.
    """

    def __init__(self, length: int, storage: Storage = PLAIN) -> None:
        self._length = length
        self._storage = storage
        self._records: deque[tuple[float, tuple[Kept, ...]]] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._records)

    def record(self, coordinate: float, value: tuple[torch.Tensor, ...]) -> None:
        """Adds the value at ``coordinate`` and forgets the oldest beyond ``length``."""
        if self._length:
            self._records.appendleft((coordinate, tuple(self._storage.keep(tensor) for tensor in value)))

    def clear(self) -> None:
        """Forgets all values."""
        self._records.clear()

    def adopt(self, length: int, storage: Storage) -> None:
        """Goes on with another length and form; what is there is converted."""
        kept = [
            (coordinate, value if storage == self._storage else tuple(storage.keep(part.read()) for part in value))
            for coordinate, value in list(self._records)[:length]
        ]
        self._length, self._storage, self._records = length, storage, deque(kept, maxlen=length)

    def fetch(self) -> None:
        """Starts to bring values that lie in host memory to the device, ahead of reading them."""
        for kept in self._kept():
            kept.fetch()

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
        return tuple(tuple(kept.read() for kept in value) for _, value in self._records)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is kept alive on the device."""
        return [tensor for kept in self._kept() for tensor in kept.tensors()]

    def host_tensors(self) -> list[torch.Tensor]:
        """Every tensor that is kept in host memory instead."""
        return [tensor for kept in self._kept() for tensor in kept.host_tensors()]

    def _kept(self) -> Iterator[Kept]:
        return (kept for _, value in self._records for kept in value)


def forecast(method: str, history: History, coordinate: float, order: float | None = None) -> tuple[torch.Tensor, ...]:
    """The feature at ``coordinate``, of at most degree ``order``, each of its tensors a new one."""
    weights = forecast_weights(method, history.coordinates, coordinate, order)
    return tuple(weighted_sum(parts, weights) for parts in zip(*history.values, strict=True))
