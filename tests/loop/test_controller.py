"""The controller: modes by step and branch, what a run remembers and when it forgets, and the report's arithmetic.

A fake clock says which step it is, and calls pass plain tensors, so no model and no pipeline takes part.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

from dit_accel.loop import controller
from dit_accel.loop.branch import Call
from dit_accel.loop.closed_loop import NO_SLOPE, ClosedLoop, Course, Gap
from dit_accel.loop.controller import Controller
from dit_accel.loop.forecast import newton_weights
from dit_accel.loop.growth import log_odds, responses
from dit_accel.loop.storage import PLAIN, StoredHistory
from dit_accel.loop.tracker import SchedulerClock, StepMode, Tick
from dit_accel.presets import load_preset
from dit_accel.sparse.site_state import SiteState
from tests.loop.euler import euler_moves
from tests.sparse.calls import calling

STEPS = 12
FULL, UPDATE, DISPATCH = StepMode.FULL, StepMode.UPDATE, StepMode.DISPATCH


class FakeClock:
    """Reads the step off the timestep itself."""

    moves = euler_moves([2 - sum((1 + step % 3) / STEPS for step in range(past)) for past in range(STEPS + 1)])

    noisy: str | None = None

    def __init__(self, *, repeats: str | None = None) -> None:
        self.repeats = repeats
        self.start_run()

    def start_run(self) -> None:
        self.run = object()

    def read(self, timestep: float, place=None) -> Tick:
        sigmas = [1 - i / STEPS for i in range(STEPS)]
        return Tick(self.run, int(timestep), STEPS, range(STEPS), sigmas, self.repeats, self.moves, noisy=self.noisy)


class Loop:
    """A denoising loop over one transformer with two layers, under a preset with some keys changed.

    Without changes: warm-up 2, an UPDATE every 4 steps, 1 final step, forecasts of order 1.
    """

    def __init__(
        self, preset: str = "exact", *, repeats: str | None = None, clock: SchedulerClock | None = None, **overrides
    ) -> None:
        defaults = {"schedule": {"warmup": 2, "interval": 4, "cooldown": 1}} if preset == "exact" else {}
        self.clock = clock or FakeClock(repeats=repeats)
        self.controller = Controller(load_preset(preset, **{**defaults, **overrides}), self.clock, "any")
        self.controller.add_transformer("transformer", ["first", "second"])

    def call(
        self,
        step: float | torch.Tensor,
        value: float | torch.Tensor = 1.0,
        *,
        context: str | None = "cond",
        shapes: tuple = ((1, 4),),
        work: dict[str, tuple[float, float]] | None = None,
        conditions: dict[str, object] | None = None,
        error: BaseException | None = None,
    ) -> tuple[Call, torch.Tensor]:
        """One transformer call that computes ``value``; returns it with its output, computed or forecast."""
        controller = self.controller
        with calling(controller, "transformer", context, step, shapes, conditions=lambda: conditions or {}) as call:
            if error is not None:
                raise error
            if call.mode is DISPATCH:
                (output,) = controller.forecast_output(call)
            else:
                output = value if isinstance(value, torch.Tensor) else torch.full((1, 4), float(value))
                (output,) = controller.observe(call, (output,), lambda tensor, rows: tensor)
                controller.read(call)
            for block, (computed, plain) in (work or {}).items():
                call.work[block], call.branch.plain[block] = (computed, 0.0), (plain, 0.0)
        return call, output

    def modes(self, steps=range(STEPS), **arguments) -> list[StepMode]:
        return [self.call(step, **arguments)[0].mode for step in steps]


def closed_loop(**overrides) -> Loop:
    keys = {"schedule.warmup": 2, "schedule.max_interval": 4, "forecast.coordinate": "step"}
    return Loop("balanced", **{**keys, **overrides})


def test_a_run_and_its_decisions_are_logged(caplog, capfd):
    """INFO has the start of a run, DEBUG each call's mode and the decisions; nothing is printed by default."""
    caplog.set_level("DEBUG", logger="dit_accel")
    loop = Loop("balanced")
    for step in range(3):
        loop.call(step)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told[0] == ("INFO", f"run of {STEPS} steps begins: balanced on any")
    assert [text for level, text in told if "full, transformer" in text and level == "DEBUG"]
    assert [text for level, text in told if "forecast error" in text and level == "DEBUG"]
    assert capfd.readouterr() == ("", "")


def test_forecast_runs_on_the_presets_coordinate():
    loop = Loop(**{"forecast.coordinate": "sigma"})
    for step in range(6):
        call, output = loop.call(step, 1 - step / STEPS)
        assert call.coordinate == 1 - step / STEPS and output.unique().item() == pytest.approx(1 - step / STEPS)


@pytest.mark.parametrize("method, order", [("newton", 1), ("newton", 2), ("taylor", 1), ("reuse", 0)], ids=str)
def test_corrector_makes_good_what_forecasts_missed(method, order, monkeypatch):
    """Outputs of one degree more, in log-odds, are forecast with errors, which computed steps correct."""
    monkeypatch.setattr(controller, "responses", lambda sigmas, moves: [0.0] * len(sigmas))
    loop = Loop(**{"forecast": {"method": method, "order": order, "corrector": True}, "schedule.warmup": order + 1})
    places = log_odds(loop.clock.read(0).sigmas)
    latents = exact = 0.0
    apart = []
    for step in range(STEPS):
        value = places[step] ** (order + 1)
        call, output = loop.call(step, value)
        latents, exact = latents + loop.clock.moves[-1][step] * output, exact + loop.clock.moves[-1][step] * value
        error = (latents - exact).abs().max().item()
        assert call.mode is DISPATCH or error < 1e-5
        apart.append(error)
    assert max(apart) > 0.01


@pytest.mark.parametrize("solver", [UniPCMultistepScheduler, DPMSolverMultistepScheduler], ids=["unipc", "dpm++"])
def test_corrector_brings_multistep_runs_to_their_end(solver, monkeypatch):
    """A later step reads outputs again, forecast or corrected; the latents end where exact outputs would bring them."""
    monkeypatch.setattr(controller, "responses", lambda sigmas, moves: [0.0] * len(sigmas))

    def end(corrector: bool | None) -> torch.Tensor:
        scheduler = solver(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
        scheduler.set_timesteps(STEPS)
        forecast = {"method": "newton", "order": 1, "coordinate": "step", "corrector": bool(corrector)}
        loop = Loop(clock=SchedulerClock(lambda: scheduler), forecast=forecast)
        latents = torch.zeros(1, 4)
        for place, timestep in zip(log_odds(scheduler.sigmas[:-1].tolist()), scheduler.timesteps, strict=True):
            output = torch.full((1, 4), place**2)
            if corrector is not None:
                _, output = loop.call(timestep, output)
            latents = scheduler.step(output, timestep, latents, return_dict=False)[0]
        return latents

    torch.testing.assert_close(end(True), end(None), rtol=0, atol=1e-4)
    assert (end(False) - end(None)).abs().min() > 0.01


def test_an_output_that_hardly_lasts_corrects_nothing():
    """Correcting the whole error at the end would mean large errors until then."""
    loop, update = Loop(forecast={"method": "newton", "order": 1, "corrector": True}), 6
    *before, end = FakeClock.moves
    loop.clock.moves = [*before, [0.05 * move if step == update else move for step, move in enumerate(end)]]
    for step in range(STEPS):
        value = torch.full((1, 4), float(step**2))
        call, output = loop.call(step, value)
        assert call.mode is not UPDATE or step == 2 or (output is value) == (step == update)


@pytest.mark.parametrize("order", [1, 2])
def test_corrector_knows_what_the_model_answers_to_shifted_latents(order, monkeypatch):
    """If outputs depend on the latents as growth says, the latents stay nearer than without the response."""

    def farthest() -> float:
        loop = Loop(forecast={"method": "newton", "order": order, "corrector": True})
        latents = exact = worst = 0.0
        known = responses([1 - i / STEPS for i in range(STEPS)])
        for step in range(STEPS):
            move, value = loop.clock.moves[-1][step], (step / 4) ** (order + 1)
            _, output = loop.call(step, value - known[step] * (exact - float(latents)))
            latents, exact = float((latents + move * output).mean()), exact + move * value
            worst = max(worst, abs(latents - exact))
        return worst

    with_it = farthest()
    monkeypatch.setattr(controller, "responses", lambda sigmas, moves: [0.0] * len(sigmas))
    assert with_it < farthest()


def test_damping_follows_the_share_of_the_slope_that_fitted_last():
    """Outputs that wander in one direction half as far as before are forecast so, from the third computed one on."""
    changes = {"forecast.damping": True, "forecast.beyond": 0.0, "forecast.corrector": False}
    loop = closed_loop(**changes, **{"schedule.target_error": 0.001})
    outputs = [torch.full((1, 4), 3.0 - 2.0**-step) for step in range(STEPS)]
    for step in range(3):
        call, _ = loop.call(step, outputs[step])
    state = call.branch.loops[0]
    assert state.damped == pytest.approx(0.5) and state.order == 1
    loop.call(3, outputs[3])
    assert state.order == state.damped == pytest.approx(0.5)
    call, output = loop.call(4)
    assert call.mode is DISPATCH
    torch.testing.assert_close(output, outputs[4])


@pytest.mark.parametrize("beyond", [0.0, 0.25, 0.5, 1.0])
def test_forecasts_go_so_far_beyond_the_degree_that_was_best(beyond):
    """They add a fraction of the next degree's term to the degree with the least error, up to the highest degree."""
    settings = {"order": 2, "beyond": beyond, "damping": False, "corrector": False, "coordinate": "step"}
    loop = closed_loop(forecast=settings, **{"schedule.target_error": 100.0, "schedule.warmup": 3})
    values = [1.0, 1.1, 1.25]
    for step, value in enumerate(values):
        call, _ = loop.call(step, value)
    state = call.branch.loops[0]
    repeated, line, parabola = (
        sum(weight * value for weight, value in zip(newton_weights(steps, 3.0), values[::-1], strict=False))
        for steps in ([2.0], [2.0, 1.0], [2.0, 1.0, 0.0])
    )
    assert len({repeated, line, parabola}) == 3
    state.go_on_with(1)
    (forecast,) = state.forecast(3)
    torch.testing.assert_close(forecast, torch.full((1, 4), line + beyond * (parabola - line)))
    state.go_on_with(2)
    torch.testing.assert_close(state.forecast(3)[0], torch.full((1, 4), parabola))


def test_less_memory_never_raises_the_degree():
    """If a budget removes records, forecasts keep their degree, or use the highest remaining one."""
    preset = load_preset("balanced", **{"forecast.beyond": 0.0})
    for chosen in range(4):
        for left in range(4):
            state = ClosedLoop(Gap(preset, Course(range(STEPS), [1.0] * STEPS)), 3)
            for step in range(4):
                state.outputs.record(float(step), (torch.ones(1),))
            state.go_on_with(chosen)
            state.adopt(left)
            assert state.order == min(chosen, left) and len(state.outputs) == left + 1


@pytest.mark.parametrize("slope, damped", [([0, 1, 3], None), ([0, 1, 0], NO_SLOPE), ([1, 1, 1], None)], ids=str)
def test_damping_is_a_share_below_one(slope, damped):
    """A slope that grows is followed whole, one that turns back not at all; without one nothing is learned."""
    loop = closed_loop(**{"forecast.damping": True})
    for step, value in enumerate(slope):
        call, _ = loop.call(step, 5.0 + value)
    assert call.branch.loops[0].damped == damped


@pytest.mark.parametrize("share, order, damped", [(-3.0, NO_SLOPE, NO_SLOPE), (0.7, 0.7, 0.7), (1.4, 1.0, None)])
def test_damped_forecasts_go_on_with_the_newest_share(share, order, damped):
    """Between 0 and 1 of the slope; NaN leaves the forecasts unchanged."""
    preset = load_preset("balanced", **{"forecast.beyond": 0.5})
    state = ClosedLoop(Gap(preset, Course(range(STEPS), [1.0] * STEPS)), 2)
    state.refit(0.3)
    state.go_on_with(0.3)
    state.refit(share)
    assert (state.order, state.damped) == (order, damped)
    state.refit(math.nan)
    assert (state.order, state.damped) == (order, None)


@pytest.mark.parametrize("moves, corrector", [(None, True), (FakeClock.moves, False)], ids=["unknown-moves", "off"])
def test_nothing_is_corrected_without_moves_or_wish(moves, corrector):
    """A computed output stays unchanged, and the report says so if a correction was requested."""
    loop = Loop(**{"forecast.corrector": corrector})
    loop.clock.moves = moves
    for step in range(STEPS):
        value = torch.full((1, 4), float(step**3))
        call, output = loop.call(step, value)
        assert call.mode is DISPATCH or output is value
    assert bool(loop.controller.report.notes) == corrector


@pytest.mark.parametrize("interval, notes", [(4, ["adds noise"]), (1, [])], ids=["forecasts", "computes-all"])
def test_noise_of_the_steps_is_noted(interval, notes):
    """The report says why more steps are computed than without noise, if any is forecast."""
    loop = Loop(**{"schedule.interval": interval, "forecast.corrector": False})
    loop.clock.noisy = "adds noise"
    loop.call(0)
    assert loop.controller.report.notes == notes


def test_recorded_output_is_a_copy():
    """Pipelines may change the transformer's output in place; the history keeps the computed values."""
    loop = Loop(**{"forecast.order": 0})
    for step in range(3):
        loop.call(step, 1.0)[1].fill_(99.0)
    assert loop.call(3)[1].tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    "contexts, later",
    [(("cond", "uncond"), (1, 4)), ((None, None), (1, 4)), ((None, None), (2, 4))],
    ids=["by-context", "by-call-order", "first-changes-its-shape"],
)
def test_branches_do_not_mix(contexts, later):
    """Each CFG branch is forecast from its own outputs, identified by name or by the order of calls in a step."""
    loop = Loop()
    for step in range(6):
        shapes = ((1, 4),) if step < 3 else (later,)
        for value, context in zip((1.0, 2.0), contexts, strict=True):
            assert loop.call(step, value, context=context, shapes=shapes)[1].unique().item() == value
    assert len(loop.controller.report.steps) == 6


def test_branches_share_the_steps_mode():
    generator = torch.Generator().manual_seed(0)
    loop, calm = closed_loop(), closed_loop()
    for step in range(STEPS):
        noise = torch.randn(1, 4, generator=generator)
        steady = loop.call(step, step + 1.0, context="cond")[0].mode
        assert loop.call(step, noise, context="uncond")[0].mode is steady and steady is not DISPATCH
    assert calm.modes(value=1.0).count(DISPATCH) > 0


@pytest.mark.parametrize("contexts", [("cond",), ("cond", "uncond")], ids=["alone", "guided"])
def test_two_branches_damp_forecasts(contexts):
    """The share of the slope is fitted where a step has a second branch, by preset `balanced`."""
    loop = closed_loop(**{"schedule.target_error": 1e-9})
    for step in range(5):
        for context in contexts:
            loop.call(step, 2.0 + 0.5**step, context=context)
    (first, *_) = loop.controller.branches.all()
    assert (first.loops[0].damped is not None) is (len(contexts) == 2)


def test_closed_loop_stretches_its_gaps_while_forecasts_hold():
    """An output that is linear in the step: once two records give the slope, intervals grow up to max_interval."""
    loop = closed_loop()
    modes = [loop.call(step, 1.0 + step)[0].mode for step in range(STEPS)]
    assert modes == [FULL, FULL, UPDATE, *[DISPATCH] * 2, UPDATE, *[DISPATCH] * 3, UPDATE, *[DISPATCH] * 2]


def test_a_prompts_error_is_that_of_its_worst_branch():
    """In any order of its branches, and for any errors of other prompts."""
    loop = closed_loop(**{"schedule.per_prompt": True})
    for step in range(2):
        for context, changes in (("cond", (2.0, 1.0)), ("uncond", (1.0, 4.0))):
            samples = {"samples": lambda: [(0,), (1,)]}
            with calling(loop.controller, "transformer", context, step, ((2, 4),), **samples) as call:
                output = torch.tensor(changes if step else (1.0, 1.0))[:, None].expand(2, 4)
                loop.controller.observe(call, (output,), lambda tensor, rows: tensor)
                loop.controller.read(call)
                call.work["first"] = call.branch.plain["first"] = 1.0, 0.0
    report = loop.controller.report
    assert [report.of_prompt(place).steps[1].error for place in range(2)] == [0.5, 0.75]
    assert report.steps[1].error == 0.75


def observe(loop, step, *output, judged=lambda tensor, rows: tensor, context="cond"):
    """A call whose output is computed, and measured on its judged tokens."""
    with calling(loop.controller, "transformer", context, step, ()) as call:
        loop.controller.observe(call, output, judged)
        loop.controller.read(call)
    return call


def test_error_that_is_no_number_is_not_hidden():
    """If one tensor of the output has no error, the call has none, for any errors of the other tensors."""
    loop = closed_loop()
    for step in range(3):
        assert observe(loop, step, torch.ones(1, 4), torch.full((1, 4), torch.nan)).mode is not DISPATCH
    assert loop.call(3, context="cond")[0].mode is UPDATE


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_error_is_that_of_the_worst_branch_tensor_and_sample(bad):
    """‖F − F̂‖ / ‖F‖ of each sample and each tensor, video and audio, on the tokens that the pipeline keeps."""
    loop = closed_loop()
    for step in range(2):
        changed = torch.tensor([[1.0, 1.0, 100.0 * step], [1.0 + step, 1.0 + step, 0.0]])
        tensors = [changed if place == bad else torch.ones(2, 3) for place in range(3)]
        for context, output in (("cond", tensors), ("uncond", [torch.ones(2, 3)] * 3)):
            observe(loop, step, *output, judged=lambda tensor, rows: tensor[:, :2], context=context)
    assert [step.error for step in loop.controller.report.steps] == [None, 0.5]


def test_branch_without_history_computes():
    loop = Loop()
    loop.modes(range(3))
    assert loop.call(3)[0].mode is DISPATCH and loop.call(3, context="skip-layer")[0].mode is UPDATE
    assert loop.call(4)[0].mode is DISPATCH and loop.call(4, context="skip-layer")[0].mode is DISPATCH
    assert [step.mode for step in loop.controller.report.steps] == ["full", "full", "update", "update", "dispatch"]


def test_branch_that_missed_an_update_computes():
    """Guidance off for a while: the gap was chosen for records that the branch does not have."""
    loop = Loop()
    for step in range(8):
        mode = loop.call(step)[0].mode
        if step < 4:
            assert loop.call(step, context="uncond")[0].mode is mode
    assert mode is DISPATCH
    assert loop.call(7, context="uncond")[0].mode is UPDATE  # the others computed step 6
    assert loop.call(8)[0].mode is DISPATCH and loop.call(8, context="uncond")[0].mode is DISPATCH


@pytest.mark.parametrize("late", [False, True], ids=["new-conditioning", "late"])
@pytest.mark.parametrize("order", [1, -1], ids=["called-first", "called-last"])
def test_a_branch_that_computes_alone_decides_for_itself(late, order):
    """However exact its own forecasts are, the other branch computes when it would have, and then both compute."""
    loop, plain = (closed_loop(**{"schedule.warmup": 1, "schedule.target_error": 2.0}) for _ in range(2))
    alone, modes = [], []
    for step in range(6):
        item = torch.full((3,), 0.0 if late or step < 2 else float(step))
        calls = [("still", 1.0, {"item": item}), ("moving", 1.0 + 5 * step, {})]
        called = [call for call in calls if not (late and call[0] == "still" and 0 < step < 4)][::order]
        found = {name: loop.call(step, value, context=name, conditions=its)[0].mode for name, value, its in called}
        modes.append(found["moving"])
        alone += [step] if found["moving"] is DISPATCH is not found.get("still", DISPATCH) else []
        assert found["moving"] is DISPATCH or DISPATCH not in found.values()
    assert alone == [4 if late else 2]
    assert modes == [plain.call(step, 1.0 + 5 * step)[0].mode for step in range(6)]


@pytest.mark.parametrize("level, warm", [("layer", True), ("head", False)])
def test_sites_need_what_their_level_reads(level, warm):
    """Features of the warm-up are enough for level layer; level head needs the symbols of an UPDATE."""
    loop = Loop(model="flux", **{"forecast.level": level, "schedule.warmup": 3, "schedule.interval": 2})
    for step in range(5):
        with calling(loop.controller, "transformer", "cond", step, ()):
            pass
    with calling(loop.controller, "transformer", "late", 4, ()) as call:
        assert call.mode is UPDATE  # a branch that never computed
    loop = Loop(model="flux", **{"forecast.level": level, "schedule.warmup": 3, "schedule.interval": 2})
    for step in (0, 1, 2, 4):  # the UPDATE at step 3 is left out
        with calling(loop.controller, "transformer", "cond", step, ()) as call:
            pass
    assert call.mode is (DISPATCH if warm else UPDATE)


@pytest.mark.parametrize(
    "overrides, recording",
    [({}, [0, 1, 2, 6, 10]), ({"schedule.interval": 1}, []), ({"schedule.warmup": 0}, [0, 4, 8])],
    ids=["warmup-and-updates", "every-step", "updates"],
)
def test_blocks_record_only_what_may_be_forecast(overrides, recording):
    """Warm-up and UPDATE steps are remembered; the final step is not, nor is a run that forecasts nothing."""
    loop = Loop(**overrides)
    assert [step for step in range(STEPS) if loop.call(step)[0].records] == recording


def test_changed_shape_drops_caches_and_is_noted():
    """A forecast never meets tensors of another shape: the call computes, afresh, and the report says why."""
    loop = Loop()
    loop.modes(range(3))
    call, _ = loop.call(3, torch.ones(2, 4), shapes=((2, 4),))
    assert call.mode is UPDATE and len(call.branch.loops[0].outputs) == 1
    assert loop.controller.report.notes == ["shapes or return_dict changed at step 3: caches dropped"]
    assert loop.call(4, shapes=((2, 4),))[1].shape == (2, 4)


def test_every_change_of_the_conditioning_is_seen_at_once():
    """The records are dropped at the first, and the next is compared with all calls before it."""
    loop, values = Loop(), [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]
    modes = [loop.call(step, conditions={"item": float(value)})[0].mode for step, value in enumerate(values)]
    assert [mode for mode in modes[3:9:2] if mode is DISPATCH] == []
    assert loop.controller.report.notes == [f"item changed at step {step}: caches dropped" for step in (3, 5, 7)]


def test_only_samples_that_compute_have_records_of_the_step():
    """A sample that is forecast stays as old as its latest computed step."""
    loop, apart, samples = closed_loop(**{"schedule.target_error": 0.3}), 0, [(0,), (1,)]
    for step in range(STEPS):
        with calling(loop.controller, "transformer", "cond", step, (), samples=lambda: samples) as call:
            before = [each.computed_step for each in call.branch.loops]
            if call.forecasts_output:
                loop.controller.forecast_output(call)
            else:
                rows = samples if call.computed_rows is None else [call.computed_rows]
                output = [torch.full((1, 4), 1.0 + 5 * row * (-1) ** step) for part in rows for row in part]
                loop.controller.observe(call, (torch.cat(output),), lambda tensor, rows: tensor)
                loop.controller.read(call)
        expected = [step if place in call.computing else age for place, age in enumerate(before)]
        assert [each.computed_step for each in call.branch.loops] == expected
        apart += len(call.computing) == 1
    assert apart


def test_changed_mode_computes_and_is_noted():
    """A step that would have been forecast computes, and the report says why, once."""
    loop = Loop()
    modes = [loop.call(step, conditions={"cache": str(step)})[0].mode for step in range(3)]
    assert modes == [FULL, FULL, UPDATE] and loop.controller.report.notes == []
    modes = [loop.call(step, conditions={"cache": str(step)})[0].mode for step in range(3, STEPS)]
    assert DISPATCH not in modes
    assert loop.controller.report.notes == ["steps computed when cache changed: the output may then have another shape"]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_exception_drops_caches(error):
    loop = Loop()
    loop.modes(range(3))
    with pytest.raises(type(error)):
        loop.call(3, error=error)
    call, _ = loop.call(4)
    assert call.mode is UPDATE and len(call.branch.loops[0].outputs) == 1


def test_new_run_starts_clean():
    loop, fresh = closed_loop(), closed_loop()
    for step in range(7):
        loop.call(step, -5.0 * step)
    loop.clock.start_run()
    for step in range(STEPS):
        call, output = loop.call(step, 1.0 + step**2)
        expected_call, expected = fresh.call(step, 1.0 + step**2)
        assert call.mode is expected_call.mode and torch.equal(output, expected)
    report, expected = loop.controller.report, fresh.controller.report
    found, wanted = ([(step.index, step.mode, step.error) for step in each.steps] for each in (report, expected))
    assert found == wanted


def test_a_run_forgets_the_accidents_of_the_one_before():
    """A branch that is called twice in one step of every run is an accident in each, and never ends the forecasts."""
    loop, reports = Loop(), []
    for _ in range(3):
        for step in range(STEPS):
            loop.call(step)
            if step == 3:
                loop.call(step)
        reports.append(loop.controller.report)
        loop.clock.start_run()
    assert [report.notes for report in reports] == [["branch called twice at step 3: caches dropped"]] * 3
    assert [[step.mode for step in report.steps] for report in reports] == [[s.mode for s in reports[0].steps]] * 3
    assert reports[0].steps_by_mode["dispatch"] > 0


@pytest.mark.parametrize("control", ["interval", "adaptive"])
def test_repeated_timesteps_compute_every_step(control):
    """Under a scheduler of second order nothing is forecast, and the report says so once."""
    loop = Loop(repeats="Heun repeats") if control == "interval" else closed_loop(repeats="Heun repeats")
    assert set(loop.modes()) == {FULL} and loop.controller.report.notes == ["every step computed: Heun repeats"]


def test_release_frees_caches_and_keeps_the_report():
    loop = Loop()
    loop.modes(work={"first": (1.0, 1.0)})
    loop.controller.release()
    assert loop.controller.read_report().steps_by_mode == {"full": 3, "update": 3, "dispatch": 6}
    assert len(loop.call(STEPS - 1)[0].branch.loops[0].outputs) == 1  # the call's own record


def test_report_adds_up_work():
    """Density is a layer's share of FLOPs at a step, over its branches; the computed fraction is the run's."""
    loop = Loop()
    loop.call(0, work={"first": (10.0, 10.0), "second": (30.0, 30.0)})
    loop.call(0, context="uncond", work={"first": (10.0, 10.0), "second": (30.0, 30.0)})
    loop.call(1, work={"first": (5.0, 10.0), "second": (0.0, 30.0)})
    loop.call(1, context="uncond", work={"first": (10.0, 30.0), "second": (15.0, 30.0)})
    report = loop.controller.report
    assert report.layers == ["first", "second"] and report.density == [[1.0, 15 / 40], [1.0, 15 / 60]]
    assert report.computed_fraction == 110 / 180


def test_report_counts_a_storage_once():
    """Cache memory counts each storage once, at the run's peak; forgetting does not lower it."""
    loop = Loop(**{"forecast.order": 0})
    stack = torch.zeros(2, 1, 8, 4)  # 64 numbers
    for step in range(3):
        with calling(loop.controller, "transformer", "cond", step, ()) as call:
            loop.controller.observe(call, (torch.zeros(1, 4),), lambda tensor, rows: tensor)
            site = call.site("first", SiteState)
            site.heads.bias_stack = PLAIN.keep(stack)
            site.heads.attention = site.features["mlp"] = StoredHistory(1)
            site.heads.attention.record(call.coordinate, (stack[0], torch.zeros(6)))
    assert loop.controller.report.cache_bytes == 4 * (64 + 6 + 4)
    loop.controller.release()
    loop.modes(range(6, 7))
    assert loop.controller.report.cache_bytes == 4 * (64 + 6 + 4)


def test_report_adds_up_times(monkeypatch):
    """A step's time is the sum of its branches' calls, read once even if the report is requested often."""
    ticks = iter([10.0, 10.5, 20.0, 20.25, 30.0, 31.0])
    monkeypatch.setattr("dit_accel.loop.timing.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    loop = Loop()
    loop.call(0)
    loop.call(0, context="uncond")
    loop.call(1)
    for _ in range(2):
        report = loop.controller.read_report()
        assert [step.seconds for step in report.steps] == [0.75, 1.0] and report.seconds == 1.75


def test_latest_symbols_are_the_first_branchs():
    loop = Loop("flux-flashomni-paper")
    for step, context, symbols in ((8, "cond", "old"), (9, "uncond", "other"), (13, "cond", "new")):
        with calling(loop.controller, "transformer", context, step % STEPS, ()) as call:
            call.blocks.symbols["first"] = SimpleNamespace(label=symbols)
        assert loop.controller.last_symbols["first"].label == ("old" if step < 13 else "new")


def test_two_transformers_keep_apart():
    """If a second transformer takes over within a run, it starts with a computed step; the first drops its records."""
    loop = Loop()
    loop.controller.add_transformer("transformer_2", ["third"])
    for step in range(4):
        loop.call(step)
    with calling(loop.controller, "transformer_2", "cond", 4, ((1, 4),)) as call:
        assert call.mode is UPDATE
        loop.controller.observe(call, (torch.zeros(1, 4),), lambda tensor, rows: tensor)
        call.work["third"] = call.branch.plain["third"] = 1.0, 0.0
    assert loop.controller.report.layers == ["first", "second", "third"]
    assert loop.controller.report.density[2] == [None, None, None, None, 1.0] and loop.call(5)[0].mode is UPDATE
