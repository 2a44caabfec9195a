"""What an error of each step counts."""

import pytest

from dit_accel.loop.growth import error_weights


@pytest.mark.parametrize(
    "sigmas, weights",
    [
        pytest.param([1.0, 0.9, 0.7, 0.3], [0.4, 0.8, 1.6, 1.6], id="falling"),
        pytest.param([0.1, 0.2, 0.4, 0.8], [0.4, 0.8, 1.6, 1.6], id="rising"),
        pytest.param([1.0, 0.5, 0.5, 0.0], [4 / 3, 0.0, 4 / 3, 4 / 3], id="equal-neighbours"),
        pytest.param([1.0], [1.0], id="one-step"),
    ],
)
def test_errors_weigh_as_far_as_steps_move_the_latents(sigmas, weights):
    """The step in sigma over its mean; the last step counts like the one before it."""
    # The last gap is counted twice, so that the mean is 1.
    expected = [weight * len(weights) / sum(weights) for weight in weights]
    assert list(error_weights("latents", sigmas)) == pytest.approx(expected)


def test_errors_of_outputs_count_alike():
    """Kind `output` takes no notice of the noise levels."""
    assert list(error_weights("output", [1.0, 0.9, 0.1])) == [1.0] * 3
