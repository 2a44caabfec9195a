"""Summary of several times of one run."""

from dit_accel.tools.measure.repeats import Spread, disturbed


def test_a_spread_is_shown_where_there_is_one():
    """Repeats within 2% are one number; a remark names the disturbed times and the size of the disturbance."""
    texts = ["3.42×", "3.44×", "3.42× (3.31 to 3.50)"]
    assert [str(Spread.of(values)) for values in ([3.42], [3.42, 3.45], [3.5, 3.31, 3.42])] == texts
    remark = disturbed("Times of turbo", Spread.of([1.0, 1.5]).width)
    assert remark.startswith("Times of turbo were disturbed") and "50%" in remark and "raise --repeats" in remark
