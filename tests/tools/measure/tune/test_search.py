"""The search over run-level thresholds, on functions whose best setting is known."""

import itertools
import math

import pytest

from dit_accel.tools.measure.tune.axes import Axis
from dit_accel.tools.measure.tune.search import LEAST_GAIN, Score, Search


def axis(key: str, count: int, start: int) -> Axis:
    return Axis(key, tuple(float(value) for value in range(count)), start)


def logged(function):
    """The function, and the settings that it was asked for."""
    asked = []

    def evaluate(setting):
        asked.append(tuple(setting.values()))
        return function(*setting.values())

    return evaluate, asked


def test_one_axis_gives_the_cheapest_value_that_meets_the_target():
    """From every start, in about as many evaluations as bisection needs, and without repetition."""
    for threshold, start in itertools.product((-1, 0, 5, 11), range(12)):
        evaluate, asked = logged(lambda value, limit=threshold: Score(limit - value, 0.9 - value / 20))
        found = Search([axis("a", 12, start)], evaluate, evaluations=99).run()
        assert found.places == ((threshold,) if threshold >= 0 else (0,)), start
        assert found.score.meets is (threshold >= 0), start
        assert len(asked) == len(set(asked)) <= 2 * math.log2(12) + 1, start


def slack_of_sum(budget, *weights):
    """Errors add up, and so do savings, which fall off at different rates."""

    def function(*values):
        error = sum(weight * value**2 for weight, value in zip(weights, values, strict=True))
        return Score(budget - error, 0.99 - sum(value / (20 + value) for value in values) / len(values))

    return function


def test_no_neighbour_is_cheaper():
    """From every start the result meets the target, and a threshold moved by one place gains nothing or misses it."""
    function, counts = slack_of_sum(60, 1.0, 2.0, 5.0), (8, 8, 3)
    for starts in itertools.product((0, 3, 7), (0, 4, 7), (0, 2)):
        axes = [axis(key, count, start) for key, count, start in zip("abc", counts, starts, strict=True)]
        found = Search(axes, logged(function)[0], evaluations=999).run()
        assert found.score == function(*found.places) and found.score.meets
        for number, step in itertools.product(range(3), (1, -1)):
            place = found.places[number] + step
            if 0 <= place < counts[number]:
                moved = function(*found.places[:number], place, *found.places[number + 1 :])
                assert not moved.meets or moved.cost > found.score.cost - LEAST_GAIN


KNOWN = {  # by name: a function of the axes' values, their numbers of values and starts, and the result
    "axes-are-traded": (lambda a, b: Score(10 - a - b, 1 - 0.01 * a - 0.05 * b), [(11, 10), (11, 0)], (0, 10), True),
    "a-plateau-is-crossed": (lambda a, b: Score(1.0, 0.5 if b == 5 else 1.0), [(2, 1), (6, 0)], (1, 5), True),
    "unreachable-gives-the-closest": (lambda value: Score(-1 - value, 0.5), [(6, 4)], (0,), False),
    "closest-saves-nothing": (lambda value: Score(0.5 - value, 1 - value / 20), [(6, 4)], (1,), False),
}


@pytest.mark.parametrize(("function", "axes", "places", "meets"), KNOWN.values(), ids=KNOWN)
def test_the_best_setting_of_a_known_function_is_found(function, axes, places, meets):
    """Computing everything meets any target, so it is no answer: the next best is returned, and said to miss."""
    named = [axis(key, *values) for key, values in zip("ab", axes, strict=False)]
    found = Search(named, logged(function)[0], evaluations=99).run()
    assert (found.places, found.score.meets) == (places, meets)


def test_no_more_evaluations_than_allowed():
    for limit in (1, 2, 5):
        evaluate, asked = logged(slack_of_sum(60, 1.0, 2.0))
        found = Search([axis("a", 8, 2), axis("b", 8, 2)], evaluate, evaluations=limit).run()
        assert len(asked) == limit and tuple(float(place) for place in found.places) in asked
