"""Outputs with schedules of their own are forecast, corrected and judged each by its own."""

import diffusers
import pytest
import torch

from dit_accel.loop.accounts import Accounts
from dit_accel.loop.controller import Controller
from dit_accel.loop.outputs import FIRST, LoopPerOutput
from dit_accel.loop.report import RunReport
from dit_accel.loop.tracker import SchedulerClock, Tick
from dit_accel.presets import load_preset
from tests.sparse.calls import calling

STEPS = 24
NAMES = (FIRST, "audio", "third")


def schedulers(*shifts):
    """MiniMax-H3's schedulers; their last noise level, 0, is no step."""
    made = [diffusers.MiniMaxH3Scheduler(shift) for shift in shifts]
    for scheduler in made:
        scheduler.set_timesteps(STEPS + 1)
    return made


def denoise(shifts, curved, **changes):
    """Latents of a run over outputs with these shifts, and the report.

    Args:
        curved: for each output, True if it bends with its noise level; otherwise it is constant.
    """
    first, *others = schedulers(*shifts)
    further = dict(zip(("audio", "third"), others, strict=False))
    controller = Controller(load_preset("balanced", **changes), SchedulerClock(lambda: first, lambda: further), "any")
    controller.add_transformer("transformer", ["block"])
    latents = [torch.full((1, 4), float(place)) for place in range(len(shifts))]
    for step in range(STEPS):
        with calling(controller, "transformer", "cond", first.timesteps[step], ()) as call:
            if call.forecasts_output:
                outputs = controller.forecast_output(call)
            else:
                levels = [scheduler.sigmas[step] for scheduler in (first, *others)]
                outputs = tuple(
                    torch.arange(1.0, 5)[None] * ((3 * level).cos() + 2 if bends else 1.0)
                    for level, bends in zip(levels, curved, strict=True)
                )
                outputs = controller.observe(call, outputs, lambda tensor, rows: tensor)
                controller.read(call)
        for place, scheduler in enumerate((first, *others)):
            timestep = scheduler.timesteps[step]
            latents[place] = scheduler.step(outputs[place], timestep, latents[place], return_dict=False)[0]
    return latents, controller.read_report()


@pytest.mark.parametrize("shift, other", [(3.0, 12.0), (12.0, 3.0)], ids=["audio", "video"])
def test_a_second_output_is_judged_as_if_it_were_alone(shift, other):
    """The first output is constant, so the second decides each measured step, with the latents of its own run."""
    (alone,), expected = denoise([shift], [True], warmup=2)
    (_, second), report = denoise([other, shift], [False, True], warmup=2)
    assert [step.mode for step in report.steps] == [step.mode for step in expected.steps]
    assert report.steps_by_mode["dispatch"] > STEPS / 4
    assert torch.allclose(second - 1.0, alone, atol=1e-5)  # it began at 1
    assert {step.decided_by for step in report.steps} == {None, "audio"}
    assert "steps decided by   audio" in str(report)


def test_the_worst_output_decides():
    """Both outputs compute wherever one of them has to, and each step names the output that decided the next."""
    runs = [denoise([12.0, 3.0], curved)[1] for curved in ([True, False], [False, True], [True, True])]
    first, second, both = [[step.mode != "dispatch" for step in report.steps] for report in runs]
    assert sum(both) >= max(sum(first), sum(second))
    assert {step.decided_by for step in runs[2].steps} <= {None, FIRST, "audio"}


class Recorded:
    """A loop that records its calls."""

    gap = rows = None
    computed_step = following = 0

    def __init__(self, error=0.0):
        self.error, self.calls, self.measured = error, [], (error,)

    def restart(self):
        self.calls.append("restart")

    def adopt(self, order):
        self.calls.append(order)

    def observe(self, step, output, used):
        return output

    def decide(self, step, measured):
        assert measured == [self.error]
        return self.error


def together(*errors):
    return LoopPerOutput({name: Recorded(error) for name, error in zip(NAMES, errors, strict=True)})


def test_all_outputs_restart_adopt_and_are_computed():
    """None keeps records of before, a higher degree, or an older computed step."""
    loops = together(0.0, 0.0, 0.0)
    loops.restart()
    loops.adopt(1)
    loops.computed_step = 7
    assert [(loop.calls, loop.computed_step) for loop in loops._loops] == [(["restart", 1], 7)] * 3


@pytest.mark.parametrize("errors", [(0.1, 0.3, 0.2), (0.3, 0.1, 0.2), (0.1, 0.2, 0.3)], ids=str)
def test_of_outputs_that_reach_as_far_the_worst_decides(errors):
    loops = together(*errors)
    loops.observe(0, (torch.ones(1),) * 3, lambda tensor: tensor)
    assert loops.decide(0, loops.measured) == 0.3 and loops.decider == NAMES[errors.index(0.3)]


@pytest.mark.parametrize("errors", [(0.1, 0.3, 0.2), (0.3, 0.2, 0.1)], ids=str)
def test_a_step_names_the_output_of_its_largest_error(errors):
    """Later and smaller errors, of other branches or prompts, change neither."""
    accounts = Accounts(RunReport("preset", "any", []), None)
    accounts.start_step(Tick(object(), 0, 1, [900.0], [0.9]))
    for error, name in zip(errors, NAMES, strict=True):
        accounts.take_error(error, 0, name)
    assert (accounts.step.error, accounts.step.decided_by) == (0.3, NAMES[errors.index(0.3)])


def test_equal_schedules_are_one():
    """Copies of one schedule, as LTX-2 has, change nothing."""
    _, report = denoise([3.0, 3.0], [True, True])
    assert {step.decided_by for step in report.steps} == {None}


def test_an_output_that_is_missing_does_not_decide():
    """A pipeline may have a second scheduler without a second output in this run."""
    first, audio = schedulers(12.0, 3.0)
    controller = Controller(load_preset("balanced"), SchedulerClock(lambda: first, lambda: {"audio": audio}), "any")
    controller.add_transformer("transformer", ["block"])
    output = (torch.ones(1, 4),)
    for timestep in first.timesteps:
        with calling(controller, "transformer", "cond", timestep, ()) as call:
            if call.forecasts_output:
                assert len(controller.forecast_output(call)) == 1
            else:
                controller.observe(call, output, lambda tensor, rows: tensor)
                controller.read(call)
        first.step(output[0], timestep, output[0])
    assert controller.read_report().steps_by_mode["dispatch"] > STEPS / 3
