"""Forecast weights reproduce their published formulas, and the history keeps the values that they need."""

import math

import pytest
import torch

from dit_accel.loop.forecast import History, forecast_weights, missed_weights, newton_weights, taylor_weights

UNEVEN = (7.5, 4.0, 3.25, 1.0, -2.0)  # newest first
METHODS = ("newton", "taylor", "reuse")


def weighted(weights: list[float], values: list[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))


def taylorseer(coordinates: tuple[float, ...], values: list[float], target: float) -> float:
    """TaylorSeer as it runs: derivatives are updated at each record, then expanded about the newest."""
    derivatives: list[float] = []
    previous = None
    for coordinate, value in zip(reversed(coordinates), reversed(values), strict=True):
        updated = [value]
        for old in derivatives:
            updated.append((updated[-1] - old) / (coordinate - previous))
        derivatives, previous = updated, coordinate
    return sum(term * (target - previous) ** i / math.factorial(i) for i, term in enumerate(derivatives))


@pytest.mark.parametrize("order", range(5))
def test_newton_is_exact_for_polynomials(order):
    """Order D continues any polynomial of degree D, on uneven spacing, to either side and in between."""

    def polynomial(t: float) -> float:
        return sum((0.5 - i) * t**i for i in range(order + 1))

    coordinates = UNEVEN[: order + 1]
    for target in (9.0, -4.0, 3.5):
        forecast = weighted(newton_weights(coordinates, target), [polynomial(t) for t in coordinates])
        assert forecast == pytest.approx(polynomial(target), rel=1e-12, abs=1e-10)


@pytest.mark.parametrize("count", range(1, 6))
def test_taylor_is_taylorseers_recursion(count):
    """The weights equal TaylorSeer's finite differences, updated at each record and expanded."""
    coordinates, values = UNEVEN[:count], [1.0, -2.0, 0.5, 4.0, 3.0][:count]
    assert weighted(taylor_weights(coordinates, 9.0), values) == pytest.approx(taylorseer(coordinates, values, 9.0))


def test_taylor_is_newton_up_to_first_order_only():
    """At D=1 both give the same line; at D=2 the one-sided second difference misses a parabola that Newton meets."""
    assert taylor_weights(UNEVEN[:1], 9.0) == newton_weights(UNEVEN[:1], 9.0)
    assert taylor_weights(UNEVEN[:2], 9.0) == pytest.approx(newton_weights(UNEVEN[:2], 9.0))
    parabola = [t * t for t in (2.0, 1.0, 0.0)]
    assert weighted(newton_weights((2.0, 1.0, 0.0), 3.0), parabola) == pytest.approx(9.0)
    assert weighted(taylor_weights((2.0, 1.0, 0.0), 3.0), parabola) == pytest.approx(8.0)  # 4 + 3 + 2 / 2


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("method", METHODS)
def test_weights_sum_to_one(method, count):
    """A constant is forecast as itself, so a linear bias inside a feature needs no special case."""
    weights = forecast_weights(method, UNEVEN[:count], 9.0)
    assert len(weights) == count and math.fsum(weights) == pytest.approx(1.0)


def test_methods_are_told_apart():
    """The name chooses the formula; reuse repeats the newest value."""
    coordinates = UNEVEN[:3]
    assert forecast_weights("reuse", coordinates, 9.0) == [1.0, 0.0, 0.0]
    assert forecast_weights("newton", coordinates, 9.0) == newton_weights(coordinates, 9.0)
    assert forecast_weights("taylor", coordinates, 9.0) == taylor_weights(coordinates, 9.0)
    assert newton_weights(coordinates, 9.0) != pytest.approx(taylor_weights(coordinates, 9.0))


def test_history_keeps_the_newest_records():
    history = History(3)
    assert (len(history), history.coordinates) == (0, ())
    values = [(torch.tensor([float(i)]), torch.tensor([-float(i)])) for i in range(4)]
    for i, value in enumerate(values):
        history.record(10.0 * i, value)
        assert history.order == min(i, 2)
    assert len(history) == 3 and history.coordinates == (30.0, 20.0, 10.0)
    assert history.values == (values[3], values[2], values[1])
    assert [float(tensor) for tensor in history.tensors()] == [3.0, -3.0, 2.0, -2.0, 1.0, -1.0]


@pytest.mark.parametrize("method", ["newton", "taylor"])
@pytest.mark.parametrize("order, below", [(0.0, 0), (0.25, 0), (1.5, 1), (2.0, 2)])
def test_degree_between_two_takes_its_share_of_the_higher(method, order, below):
    """A fractional degree adds that fraction of the next degree's term; integers are those of a shorter history."""
    low, high = (
        [*forecast_weights(method, UNEVEN[: whole + 1], 9.0), 0.0, 0.0][:3] for whole in (below, min(below + 1, 2))
    )
    expected = [a + (order - below) * (b - a) for a, b in zip(low, high, strict=True)]
    assert forecast_weights(method, UNEVEN[:3], 9.0, order) == pytest.approx(expected)


PLACES = {coordinate: math.log(coordinate / (20 - coordinate)) for coordinate in (14.0, 12.0, 10.0, 9.0, 5.0, 4.0, 1.0)}


@pytest.mark.parametrize("order", [0, 0.5, 1, 2])
def test_missed_weights_sum_to_zero_and_need_forecasts(order):
    """A constant bias of the outputs is never missed; without forecasts nothing is."""
    records = [9.0, 5.0, 4.0, 1.0]
    weights = missed_weights("newton", records, order, 14.0, [(10.0, 0.5), (12.0, 2.0)], PLACES)
    assert len(weights) == 5 and sum(weights) == pytest.approx(0.0, abs=1e-12)
    assert weights[0] > 0.0  # if forecasts fall short, more of the new output corrects them
    assert missed_weights("newton", records, order, 14.0, [], PLACES) == [0.0] * 5
