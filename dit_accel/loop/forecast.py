"""Forecasts as weighted sums of the history: ``F̂(t) = Σ_m w_m(t) · F_m`` with ``Σ w_m = 1``.

The history holds computed features, no derivatives. The weights sum to one, so a linear bias in F is no special case.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dit_accel.kernels import weighted_sum

INTERPOLATED = 2  # least degree between records; otherwise one more than the forecasts', for F is one more node


def newton_weights(coordinates: Sequence[float], target: float) -> list[float]:
    """Return the weights of the polynomial through the recorded values, in Lagrange's form.

    Exact for polynomials of degree ``len(coordinates) − 1`` on any spacing.

    Args:
        coordinates: coordinates of the recorded values, newest first, all different.
        target: coordinate of the forecast.
    """
    return [
        math.prod((target - other) / (node - other) for other in coordinates if other != node) for node in coordinates
    ]


def taylor_weights(coordinates: Sequence[float], target: float) -> list[float]:
    """Return the weights of TaylorSeer's forecast ``Σ_i Δ^i F · x^i / i!`` (equation 3).

    x is the distance to the newest value. Each recorded value's i-th difference is divided by the gap before *that*
    record, as TaylorSeer does. Its differences are one-sided, so the forecast is not exact beyond first order.
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
    """Return the weights of the recorded values for a forecast at ``target``, newest first; they sum to one.

    A fractional degree interpolates between the weights of two degrees: degree 0.6 follows 0.6 of the slope.

    Args:
        method: ``newton``, ``taylor`` or ``reuse``.
        coordinates: coordinates of the recorded values, newest first.
        target: coordinate of the forecast.
        order: highest degree; values after the newest ``order + 1`` have weight 0. None = all values are used.
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


def missed_weights(
    method: str,
    coordinates: Sequence[float],
    order: float,
    here: float,
    forecasts: Sequence[tuple[float, float]],
    places: Mapping[float, float],
) -> list[float]:
    """Return the errors of forecasts, ``Σ_i a_i · (F̄_i − F̂_i)``, as weights over the computed output and the records.

    Args:
        method, order: method and degree of the forecasts.
        coordinates: coordinates of the records that they used, newest first.
        here: coordinate of the computed output.
        forecasts: coordinate and factor ``a_i`` of each forecast.
        places: variable of the interpolation F̄, by coordinate.

    Returns:
        Weights of the output and then the records; they sum to zero.
    """
    weights = [0.0] * (1 + len(coordinates))
    nodes, degree = [places[node] for node in (here, *coordinates)], max(INTERPOLATED, order + 1)
    for coordinate, share in forecasts:
        better = forecast_weights("newton", nodes, places[coordinate], degree)
        extrapolated = [0.0, *forecast_weights(method, coordinates, coordinate, order)]
        weights = [weight + share * (b - m) for weight, b, m in zip(weights, better, extrapolated, strict=True)]
    return weights


class History:
    """The newest values of one feature, which may consist of several tensors.

    Args:
        length: most values; a forecast of degree D reads D + 1.

    Attributes:
        coordinates: coordinates of the values, newest first.
        records: the values in the form in which they are kept.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.records: tuple[tuple[Any, ...], ...] = ()
        self.coordinates: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.coordinates)

    def record(self, coordinate: float, value: tuple[torch.Tensor, ...]) -> None:
        """Add the value at ``coordinate`` and drop the oldest beyond ``length``."""
        self.records = (value, *self.records)[: self._length]
        self.coordinates = (coordinate, *self.coordinates)[: self._length]

    def clear(self) -> None:
        self.records = self.coordinates = ()

    def shorten(self, length: int) -> None:
        """Change the most values."""
        self._length = length
        self.records, self.coordinates = self.records[:length], self.coordinates[:length]

    @property
    def order(self) -> int:
        """Degree of the polynomial through all recorded values."""
        return len(self.coordinates) - 1

    @property
    def values(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Recorded values, newest first."""
        return self.records

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors on the device."""
        return [tensor for value in self.records for tensor in value]


def forecast(method: str, history: History, coordinate: float, order: float | None = None) -> tuple[torch.Tensor, ...]:
    """Return the forecast feature at ``coordinate``, of degree ``order`` at most, in new tensors."""
    weights = forecast_weights(method, history.coordinates, coordinate, order)
    return tuple([weighted_sum(parts, weights) for parts in zip(*history.values, strict=True)])


def relative_error(value: torch.Tensor, forecast: torch.Tensor) -> torch.Tensor:
    """Return ``‖F − F̂‖ / ‖F‖`` of the worst sample, float32 ``[]``; 0 where both norms are 0."""
    value, forecast = value.float().flatten(1), forecast.float().flatten(1)
    missed = (value - forecast).norm(dim=1)
    return torch.where(missed == 0, missed, missed / value.norm(dim=1)).max()


def best_share(
    output: Iterable[torch.Tensor], newest: Iterable[torch.Tensor], linear: Iterable[torch.Tensor]
) -> torch.Tensor:
    """Return the s for which ``newest + s · (linear − newest)`` is nearest to the output, over all its tensors."""
    along, square = [], []
    for value, last, predicted in zip(output, newest, linear, strict=True):
        slope = (predicted.float() - last.float()).flatten()
        along.append(torch.dot((value.float() - last.float()).flatten(), slope))
        square.append(torch.dot(slope, slope))
    return sum(along[1:], along[0]) / sum(square[1:], square[0])
