"""Timelines: a bar a step in the colour of its kind, dots for errors, and valid XML at every length."""

from xml.etree import ElementTree

import pytest

from dit_accel.tools.media.timeline import HEIGHT, STEP_COLOURS, STEP_KINDS, WIDTH, timeline

STEPS = [("full", None), ("update", 0.02), ("dispatch", None), ("update", 0.2)]


def parts(drawn, name):
    return list(ElementTree.fromstring(drawn).iter(name))


def text(drawn):
    return " ".join(ElementTree.fromstring(drawn).itertext())


@pytest.mark.parametrize("done", range(5))
def test_each_step_has_a_bar_of_its_kinds_colour(done):
    """Bars keep their places during the run, and the legend counts them."""
    drawn = timeline("Plain", STEPS[:done], total=8)
    bars = parts(drawn, "rect")
    assert [bar.get("fill") for bar in bars] == [STEP_COLOURS[STEP_KINDS[mode]] for mode, _ in STEPS[:done]]
    whole = parts(timeline("Plain", STEPS, total=8), "rect")
    assert [bar.get("x") for bar in bars] == [bar.get("x") for bar in whole[:done]]
    computed = sum(STEP_KINDS[mode] == "computed" for mode, _ in STEPS[:done])
    assert (f"{computed} computed" in text(drawn)) == (computed > 0)


def test_a_legend_names_kinds_of_steps_and_no_modes():
    """Readers know computed and forecast steps; an entry stands for what is drawn."""
    shown = text(timeline("Accelerated", STEPS, total=8))
    assert "3 computed" in shown and "1 forecast" in shown and "error" in shown
    assert not any(mode in shown for mode in ("full", "update", "dispatch"))
    plain = text(timeline("Plain", STEPS[:1], total=8))
    assert "forecast" not in plain and "error" not in plain


def test_larger_errors_lie_higher():
    """The axis is logarithmic; errors outside of it, and errors of 0, are at its ends."""
    drawn = timeline("", [("update", error) for error in (0.0, 1e-9, 0.02, 0.2, 5.0, float("inf"))], total=6)
    heights = [float(bar.get("d").partition(",")[2].removesuffix(" h0")) for bar in parts(drawn, "path")]
    assert heights[0] == heights[1] > heights[2] > heights[3] > heights[4] == heights[5]
    assert all(0 < height < HEIGHT for height in heights)


def test_more_steps_than_were_expected_stay_inside():
    bars = parts(timeline("", STEPS, total=2), "rect")
    assert float(bars[-1].get("x")) + float(bars[-1].get("width")) <= WIDTH
