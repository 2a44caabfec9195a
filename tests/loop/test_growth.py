"""Weight of an error at each step, and the model's response to an error of the latents."""

import math

import diffusers
import pytest

from dit_accel.loop import growth
from dit_accel.loop.growth import bends, error_weights, log_odds, responses
from dit_accel.loop.moves import try_out
from tests.loop.euler import euler_moves

FALLING = [1.0, 0.9, 0.7, 0.3]


@pytest.mark.parametrize(
    "sigmas",
    [
        pytest.param(FALLING, id="flow"),
        pytest.param([-sigma for sigma in FALLING], id="negative"),
        pytest.param([1 - sigma for sigma in FALLING], id="rising"),
        pytest.param([sigma * 1000 for sigma in FALLING], id="timesteps"),
    ],
)
def test_errors_count_by_what_they_do_to_the_result(sigmas):
    """Each step's weight is its move of the latents times the growth of an error at its end, for any noise levels."""
    effects = [0.1 * 0.1**-growth.GROWTH, 0.2 * 0.3**-growth.GROWTH, 0.4 * 0.7**-growth.GROWTH, 0.3]
    expected = [effect * 4 / sum(effects) for effect in effects]
    assert error_weights(sigmas) == pytest.approx(expected)


@pytest.mark.parametrize("sigmas", [[1.0], [0.5, 0.5], [1.0, 1.0, 0.5, 0.0], [0.0]])
def test_weights_are_finite_and_one_on_average(sigmas):
    """Steps that don't move count nothing, and nothing is divided by 0."""
    weights = error_weights(sigmas)
    assert all(math.isfinite(weight) and weight >= 0 for weight in weights)
    assert sum(weights) == pytest.approx(len(sigmas))


def test_a_response_is_larger_where_little_of_the_image_is_settled():
    """The response opposes the shift, for rising and falling noise levels, and is bounded where nothing is settled."""
    falling = [-growth.RESPONSE / error for error in (0.4, 0.5, 0.8)]
    assert responses([0.6, 0.5, 0.2]) == pytest.approx(falling)
    rising = euler_moves([0.4, 0.5, 0.8, 1.0])
    expected = [growth.RESPONSE / error for error in (0.4, 0.5, 0.8)]
    assert responses([0.4, 0.5, 0.8], rising) == pytest.approx(expected)
    assert responses([1.0, 0.5])[0] == pytest.approx(-growth.RESPONSE / growth.LEAST_SHARE)


def test_outputs_bend_more_where_less_noise_is_left():
    """For rising and falling noise levels, and bounded at noise level 0."""
    assert bends([0.8, 0.4]) == pytest.approx([0.8**-growth.BEND, 0.4**-growth.BEND])
    assert bends([0.2, 0.6]) == pytest.approx([0.8**-growth.BEND, 0.4**-growth.BEND])
    assert bends([1.0, 0.0]) == pytest.approx([1.0, growth.LEAST_SHARE**-growth.BEND])


def test_outputs_that_point_to_the_image_answer_the_other_way():
    """MiniMax-H3's noise levels fall and its moves are positive, so its output has the opposite sign of Euler's."""
    scheduler = diffusers.MiniMaxH3Scheduler()
    scheduler.set_timesteps(9)
    levels = scheduler.sigmas[:-1].tolist()
    plain, turned = responses(levels, euler_moves([*levels, 0.0])), responses(levels, try_out(scheduler).moves)
    assert turned == pytest.approx([-each for each in plain]) and min(turned) > 0


@pytest.mark.parametrize("scale", [1, -1, 1000])
def test_log_odds_of_noise_levels(scale):
    """They are finite, fall in steps that are long at both ends, and are refused where two steps have the same."""
    found = log_odds([scale * sigma for sigma in (1.0, 0.75, 0.5, 0.25, 0.0)])
    assert found[0] == -found[-1] == pytest.approx(math.log((1 + growth.LEAST_ODDS) / growth.LEAST_ODDS))
    assert found[2] == pytest.approx(0.0) and found[0] - found[1] > found[1] - found[2] > 0
    assert log_odds([1.0, 0.5, 0.5]) is None
