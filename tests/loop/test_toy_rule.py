"""A rule of one's own for the computed steps, made as CONTRIBUTING.md says: its section, its class, one line."""

from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Tag

from dit_accel import accelerated
from dit_accel.errors import PresetError
from dit_accel.loop.closed_loop import Gap
from dit_accel.loop.controller import RULES
from dit_accel.loop.interval import IntervalLoop
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset, load_preset
from dit_accel.presets.sections import FixedSchedule, Schedule
from tests.models import tiny


class ListedSchedule(FixedSchedule):
    """Computed steps by a list."""

    interval: ClassVar[int | None] = None
    control: Literal["listed"] = "listed"
    computed: list[int]
    """listed: indices of the computed steps."""


class ListedGap(Gap):
    def decide_mode(self, step):
        return StepMode.UPDATE if step in self.preset.schedule.computed else StepMode.DISPATCH

    def observe(self, step, *measured, **of):
        return step + 1


@pytest.fixture
def listed():
    """The rule in the tables, and in the union of a preset's sections, which is otherwise made of `Schedule.forms`."""
    field = Preset.model_fields["schedule"]
    shipped = field.annotation
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "listed", (IntervalLoop, ListedGap))
        patch.setitem(Schedule.forms, "listed", ListedSchedule)
        field.annotation = shipped | Annotated[ListedSchedule, Tag("listed")]
        Preset.model_rebuild(force=True)
        yield
    field.annotation = shipped
    Preset.model_rebuild(force=True)


def test_a_rule_is_a_section_a_class_and_a_line(listed):
    preset = load_preset("balanced", schedule={"control": "listed", "computed": [0, 1, 3, 4]}, corrector=True)
    pipe, steps = tiny.pipeline("flux"), 6
    with accelerated(pipe, preset):
        tiny.output("flux", steps)
        report = pipe.dit_accel.report()
    assert [step.mode for step in report.steps] == ["update", "update", "dispatch", "update", "update", "dispatch"]
    for wrong, message in (({"computed": [0], "target_error": 0.1}, "target_error"), ({}, "computed")):
        with pytest.raises(PresetError, match=message):
            load_preset("exact", schedule={"control": "listed", **wrong})
