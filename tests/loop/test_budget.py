"""Budgets of computed steps and of seconds."""

import random
from itertools import pairwise

import pytest
import torch

from dit_accel import accelerate_pipeline, accelerated
from dit_accel.errors import UnsupportedError
from dit_accel.loop import budget
from dit_accel.loop.budget import BudgetGap, Deadline, usual_bound
from dit_accel.loop.closed_loop import Course, Gap
from dit_accel.loop.growth import error_weights
from dit_accel.loop.timing import CallParts
from dit_accel.loop.tracker import StepMode
from dit_accel.models.parallel.branches import GROUP
from dit_accel.presets import load_preset
from tests.models import tiny


def computed(steps, error_at, **keys):
    """Steps that compute, with errors of forecasts by step and distance from the latest computed step."""
    sigmas = [1 - step / steps for step in range(steps)]
    gap, found = BudgetGap(load_preset("balanced", **keys), Course(range(steps), error_weights(sigmas))), []
    for step in range(steps):
        if gap.mode(step) is not StepMode.DISPATCH:
            nodes = found[:-4:-1]
            gap.observe(step, nodes, min(len(nodes) - 1, 1), error_at(step, step - nodes[0]) if nodes else float("inf"))
            found.append(step)
    return found


def test_a_budget_is_met_exactly():
    """Errors may be 0, huge, NaN, or of any order of magnitude."""
    draw = random.Random(0)
    for _ in range(200):
        steps, count = draw.randint(1, 60), draw.randint(1, 60)
        errors = [draw.choice([0.0, 1e9, float("nan"), 10 ** draw.uniform(-4, 1)]) for _ in range(steps)]
        found = computed(steps, lambda step, _, errors=errors: errors[step], computed_steps=count)
        assert len(found) == min(steps, count) and found[0] == 0


def test_steps_are_computed_where_errors_are_larger():
    def late(larger):
        def error(step, ahead):
            return (0.4 if (step > 20) == larger else 0.02) * ahead**2 / 9

        return sum(step > 20 for step in computed(40, error, computed_steps=12))

    assert late(True) >= late(False) + 2


def test_even_errors_get_intervals_that_grow_from_the_start():
    """The first interval is short, because one record has no slope; then no interval leaps."""
    found = computed(28, lambda _, ahead: 0.03 * ahead, computed_steps=8)
    assert found[:2] == [0, 1] and max(later - step for step, later in pairwise(found)) <= 8


@pytest.mark.parametrize("steps", [20, 28, 50])
def test_fewer_computed_steps_have_a_larger_bound(steps):
    assert all(more >= less for more, less in pairwise([usual_bound(count, steps) for count in range(3, steps + 2)]))


@pytest.mark.parametrize(("steps", "count"), [(12, 7.2), (20, 8.7), (28, 11.2), (50, 13.5), (100, 17.5)])
def test_the_usual_bound_is_that_of_measured_runs(steps, count):
    """`balanced`, whose bound is 0.15, computed so many steps on average of five models."""
    assert usual_bound(count, steps) == pytest.approx(0.15, rel=0.5)


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_run_spends_its_budget(prompts, guidance):
    """Every prompt of a batch spends its own, and all branches of guidance compute in the same steps."""
    pipe, calls = tiny.pipeline("flux"), {"true_cfg_scale": guidance, "negative_prompt": ["none"] * prompts}
    with accelerated(pipe, "balanced", computed_steps=5, per_prompt=prompts > 1):
        tiny.output("flux", 9, prompt=["a"] * prompts, **(calls if guidance > 1 else {}))
        report = pipe.dit_accel.report()
    runs = [record.modes for record in report.prompts] or [[step.mode for step in report.steps]]
    assert len(runs) == prompts and all(sum(mode != "dispatch" for mode in modes) == 5 for modes in runs)


def deadline(monkeypatch, limit, costs, overhead=0.01, after=0.0):
    """Run steps that take so long if they compute; return the seconds, and how many steps computed."""
    now, done, left = 100.0, 0, len(costs)
    monkeypatch.setattr(budget.time, "perf_counter", lambda: now)
    clock = Deadline(limit, now, after)
    for step, cost in enumerate(costs):
        now += overhead
        clock.begin_step()
        if left > 0:
            done += 1
            for _ in range(2):  # calls of guidance; the first step has no error to read
                now += cost / 2
                left = clock.left(len(costs) - step - 1) if step else left
    return now - 100.0, done


def floor(limit, cost=0.1, steps=20):
    """Computed steps with a floor and a limit of seconds, and the remarks; each error grows with its distance."""
    sigmas, remarks, found, now = [1 - step / steps for step in range(steps)], [], [], 0.0
    keys = {"target_psnr": 25.0} | ({"max_seconds": limit} if limit else {})
    preset = load_preset("balanced", **keys)
    gap = (BudgetGap if limit else Gap)(preset, Course(range(steps), error_weights(sigmas)))
    gap.note = remarks.append
    for step in range(steps):
        if gap.mode(step) is not StepMode.DISPATCH:
            now, nodes = now + cost, found[:-4:-1]
            if limit and step:
                gap.left = max(int((limit - now) / cost), 0)
            gap.observe(step, nodes, min(len(nodes) - 1, 1), 0.01 * (step - nodes[0]) ** 2 if nodes else float("inf"))
            found.append(step)
    return found, remarks


def test_a_floor_decides_as_long_as_there_is_time():
    """With ample time the same steps compute as without a limit; with less no more than fit, and a remark says so."""
    steps, _ = floor(None)
    for limit in [0.05 * number for number in range(1, 60)]:
        found, remarks = floor(limit)
        assert found == steps if not remarks else len(found) <= max(limit / 0.1 + 1, 3)
        assert remarks or limit >= 0.1 * (len(steps) - 1)
    assert floor(3.0) == (steps, []) and floor(0.4)[1]


@pytest.mark.parametrize("first", [0.1, 3.0])
def test_a_deadline_is_used_and_kept(monkeypatch, first):
    """Within one computed step, also if the first step compiles kernels or later steps slow down a little."""
    for limit in (first + 1.0, first + 2.3, first + 4.0):
        seconds, done = deadline(monkeypatch, limit, [first, *[0.1] * 49])
        assert limit - 0.25 <= seconds <= limit + 0.1 or done == 50
    assert deadline(monkeypatch, 3.0, [0.1] * 50, after=1.0)[0] == pytest.approx(2.0, abs=0.25)
    assert deadline(monkeypatch, 0.01, [0.1] * 20)[1] == 3  # it has passed, and the first steps still compute


def test_a_call_ends_in_time():
    pipe = tiny.pipeline("flux")
    with accelerated(pipe, "balanced", max_seconds=1e-3):
        tiny.output("flux", 8)
        assert pipe.dit_accel.report().steps_by_mode["dispatch"] == 5
    with accelerated(pipe, "balanced", max_seconds=1e3):
        tiny.output("flux", 8)
        assert "dispatch" not in pipe.dit_accel.report().steps_by_mode


def test_the_time_after_the_steps_is_that_of_the_call_before():
    """Of an earlier preset's call too, so that a server can change the preset for each request."""
    pipe = tiny.pipeline("flux")
    with accelerated(pipe, "exact"):
        tiny.output("flux", 2)
        measured = pipe.dit_accel.report().parts
        accelerate_pipeline(pipe, max_seconds=60.0)
        tiny.output("flux", 2)
        (_, after) = pipe.dit_accel._runs.of(pipe).parts.bounds(["transformer"])
    assert 0 < after == measured["rest"]


def test_a_failed_call_has_no_time_after_the_steps():
    """The time of decoding stays that of the last call that ended."""
    parts = CallParts()
    parts.keeps_previous = True
    for ends in (True, False, False):
        parts.begin(torch.device("cpu"))
        for name in ("transformer", "vae.decoder"):
            parts.enter(name)
            parts.leave()
        if ends:
            parts.end()
    assert list(parts.previous) == ["transformer", "vae.decoder", "rest"]


def test_processes_that_share_a_call_have_clocks_of_their_own(monkeypatch):
    """They could decide differently, and wait for each other for ever."""
    pipe = tiny.pipeline("flux")
    monkeypatch.setattr(pipe.transformer, GROUP, object(), raising=False)
    with accelerated(pipe, max_seconds=1.0), pytest.raises(UnsupportedError, match="clocks differ"):
        tiny.output("flux", 2)
