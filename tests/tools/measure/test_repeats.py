"""Summary of several times of one run."""

import pytest

from dit_accel.tools.measure.repeats import Spread, disturbed, speedup


def test_a_speedup_is_the_median_of_neighbours():
    """One disturbed time on either side leaves it as it is, and so does a machine that slows down under both."""
    assert speedup([4.0, 4.0, 4.0], [2.0, 2.0, 80.0]) == (2.0, 0.05, 2.0)
    assert speedup([4.0, 160.0, 4.0], [2.0, 2.0, 2.0]).median == 2.0
    assert speedup([4.0, 8.0, 16.0], [2.0, 4.0, 8.0]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("values", "text"),
    [([3.42], "3.42×"), ([3.42, 3.45], "3.44×"), ([3.5, 3.31, 3.42], "3.42× (3.31 to 3.50)")],
    ids=["one", "close", "apart"],
)
def test_a_spread_is_shown_where_there_is_one(values, text):
    """Repeats within 2% are one number."""
    assert str(Spread.of(values)) == text


def test_the_remark_says_what_helps():
    """It names the disturbed times and the size of the disturbance."""
    remark = disturbed("Times of turbo", Spread.of([1.0, 1.5]).width)
    assert remark.startswith("Times of turbo were disturbed") and "50%" in remark and "raise --repeats" in remark
