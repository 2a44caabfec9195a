"""The timeline that grows: a column a step in its mode's colour, dots for errors, and valid XML at every length."""

from xml.etree import ElementTree

import pytest

from dit_accel.tools.figures import MODE_COLOURS
from dit_accel.tools.timeline import HEIGHT, WIDTH, timeline_svg

STEPS = [("full", None), ("update", 0.02), ("dispatch", None), ("update", 0.2)]


def parts(svg, name):
    return [each for each in ElementTree.fromstring(svg) if each.tag == name]


@pytest.mark.parametrize("done", range(5))
def test_each_step_has_a_column_of_its_modes_colour(done):
    """Columns keep their places during the run, and the legend counts them."""
    svg = timeline_svg(STEPS[:done], total=8)
    columns = [each for each in parts(svg, "rect") if len(each)]
    assert [each.get("fill") for each in columns] == [MODE_COLOURS[mode] for mode, _ in STEPS[:done]]
    whole = [each for each in parts(timeline_svg(STEPS, total=8), "rect") if len(each)]
    assert [each.get("x") for each in columns] == [each.get("x") for each in whole[:done]]
    assert f"{sum(mode == 'update' for mode, _ in STEPS[:done])} update" in svg


def test_larger_errors_lie_higher():
    """The axis is logarithmic; errors outside of it, and errors of 0, are at its ends."""
    svg = timeline_svg([("update", error) for error in (0.0, 1e-9, 0.02, 0.2, 5.0, float("inf"))], total=6)
    heights = [float(each.get("cy")) for each in parts(svg, "circle")]
    assert heights[0] == heights[1] > heights[2] > heights[3] > heights[4] == heights[5]
    assert all(0 < height < HEIGHT for height in heights)


def test_more_steps_than_were_expected_stay_inside():
    columns = [each for each in parts(timeline_svg(STEPS, total=2), "rect") if len(each)]
    assert float(columns[-1].get("x")) + float(columns[-1].get("width")) <= WIDTH
