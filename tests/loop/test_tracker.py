"""Clocks find the step that a denoising loop is at, and controls give each step its mode."""

import math

import diffusers
import pytest
import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.forecast import newton_weights
from dit_accel.loop.tracker import (
    AdaptiveControl,
    IntervalControl,
    SchedulerClock,
    StepMode,
    Tick,
    TimestepClock,
    make_control,
)
from dit_accel.presets import Schedule

# diffusers' own, at the construction of a scheduler
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

LETTERS = {StepMode.FULL: "F", StepMode.UPDATE: "U", StepMode.DISPATCH: "D"}

EVEN = [1.0] * 40  # errors of all steps count alike


def modes(control, steps: int) -> str:
    return "".join(LETTERS[control.mode(step, steps)] for step in range(steps))


def fixed(**keys) -> Schedule:
    return Schedule(control="interval", **keys)


def closed_loop(**keys) -> AdaptiveControl:
    return AdaptiveControl(
        Schedule(**{"control": "adaptive", "target_error": 0.05, "warmup": 0, "cooldown": 0, **keys})
    )


def interval_after(control: AdaptiveControl, step: int, steps: int) -> int:
    """Steps from ``step`` to the next one that computes, or to the end of the run."""
    computing = (n for n in range(1, steps - step) if control.mode(step + n, steps) is not StepMode.DISPATCH)
    return next(computing, steps - step)


@pytest.mark.parametrize(
    "keys, sequence",
    [
        ({"warmup": 2, "interval": 3, "cooldown": 1}, "FFUDDUDDUF"),
        ({"warmup": 0, "interval": 4, "cooldown": 0}, "UDDDUDDDUD"),
        ({"warmup": 3, "interval": 2, "cooldown": 3}, "FFFUDUDFFF"),
        ({"warmup": 2, "interval": 1, "cooldown": 1}, "FFFFFFFFFF"),
        ({"warmup": 8, "interval": 5, "cooldown": 4}, "FFFFFFFFFF"),
        ({"warmup": 20, "interval": 5, "cooldown": 0}, "FFFFFFFFFF"),
    ],
    ids=["paper", "bare", "long-end", "every-step", "overlap", "long-warmup"],
)
def test_interval_control_repeats_its_interval(keys, sequence):
    """Warm-up, then one UPDATE and interval − 1 DISPATCH steps, then the final steps; interval 1 computes all."""
    assert modes(IntervalControl(fixed(**keys)), 10) == sequence


def test_interval_control_ignores_errors():
    """A fixed schedule does not react to what is observed."""
    control = IntervalControl(fixed(warmup=0, interval=4, cooldown=0))
    control.observe(0, range(8), EVEN, [-1.0, -2.0], 1, 100.0)
    assert modes(control, 8) == "UDDDUDDD"


@pytest.mark.parametrize(
    "schedule, kind", [(fixed(interval=2), IntervalControl), (Schedule(target_error=0.1), AdaptiveControl)]
)
def test_make_control_follows_the_schedule(schedule, kind):
    """The preset's `control` names the class."""
    assert type(make_control(schedule)) is kind


def test_closed_loop_computes_until_it_has_observed():
    """Without an error to go by every step computes, in full during the warm-up and at the end."""
    assert modes(closed_loop(warmup=3, cooldown=2), 8) == "FFFUUUFF"


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("gap", [1, 3])
@pytest.mark.parametrize("error", [1.0, 0.051, 0.021, 0.0051, 0.0006, 1e-6])
def test_closed_loop_follows_its_formula_at_even_spacing(error, gap, order):
    """The next UPDATE comes after the largest n <= max_interval with ``Σ_(i<n) e · C(i / g + D, D + 1) <= target``.

    With nodes g apart the remainder d · (d + g) · … · (d + D g) is that binomial coefficient of real d / g, but for
    factors that the error has too.
    """
    control = closed_loop(target_error=0.05, max_interval=12)
    control.observe(15, range(40), EVEN, [15 - gap * (k + 1) for k in range(3)], order, error)

    def forecast_error(distance: int) -> float:
        return error * math.prod(distance / gap + k for k in range(order + 1)) / math.factorial(order + 1)

    together = [sum(map(forecast_error, range(n))) for n in range(1, 13)]
    assert interval_after(control, 15, 40) == max(n for n, error in enumerate(together, 1) if error <= 0.05)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_closed_loop_knows_the_errors_of_polynomials(order):
    """For polynomials one degree higher, on any spacing, what is expected of the farthest forecast comes true."""
    steps, recorded, here = [0.0, 1.0, 4.0, 5.5, 7.0, 10.0, 11.0, 15.0, 16.0], [2, 1, 0], 3
    output = [t ** (order + 1) + 1.0 for t in steps]

    def error(at: int, nodes: list[int]) -> float:
        weights = newton_weights([steps[node] for node in nodes], steps[at])
        return abs(output[at] - sum(weight * output[node] for weight, node in zip(weights, nodes, strict=True)))

    measured = error(here, recorded[: order + 1])
    following = error(here + 3, [here, *recorded][: order + 1])
    for target, interval in ((0.999 * following, 3), (1.001 * following, 4)):
        scale = 0.5 / target  # a target is below 1
        control = closed_loop(target_error=0.5)
        farthest = [float(step >= here + 3) for step in range(len(steps))]
        control.observe(here, steps, farthest, [steps[node] for node in recorded], order, scale * measured)
        assert interval_after(control, here, len(steps)) == interval


@pytest.mark.parametrize(
    "error, interval",
    [(math.nan, 1), (math.inf, 1), (0.0, 7), (0.05, 2)],
    ids=["nan", "infinite", "zero", "on-target"],
)
def test_closed_loop_at_extreme_errors(error, interval):
    """What is no number computes the next step; a perfect forecast reaches max_interval; the target itself is met."""
    control = closed_loop(target_error=0.05, max_interval=7)
    control.observe(5, range(40), EVEN, [4, 3], 1, error)
    assert interval_after(control, 5, 40) == interval


@pytest.mark.parametrize("errors", [(0.0, 0.012), (0.012, 0.0), (0.012, 0.0, 0.001)], ids=str)
def test_worst_error_of_a_step_decides(errors):
    """Branches are judged one after the other at one step; the shortest interval counts, in any order."""
    control = closed_loop(target_error=0.05)
    for error in errors:
        control.observe(5, range(40), EVEN, [4, 3], 1, error)
    assert interval_after(control, 5, 40) == 3  # 0.012, 0.036, 0.072, … one, two, three steps away, added up


def test_each_update_decides_afresh():
    """A bad step shortens the interval after it and no other."""
    control = closed_loop(target_error=0.05, max_interval=7)
    control.observe(5, range(40), EVEN, [4, 3], 1, 1.0)
    control.observe(6, range(40), EVEN, [5, 4], 1, 0.0)
    assert interval_after(control, 6, 40) == 7


@pytest.mark.parametrize("direction", [1, -1], ids=["ascending", "descending"])
def test_closed_loop_measures_distance_on_the_coordinate(direction):
    """On uneven spacing the forecast may reach as far on the coordinate, not as many steps."""
    # From step 2 the others lie at distances 2, 4, 5, 14, 15 and 16. With e = 0.01 over a gap g at order 0 those of
    # forecasts may add up to 5 g: 2.25, 6.25, 11.25 or all. The step behind the last one in reach computes.
    coordinates = [direction * x for x in (0.0, 2.0, 3.0, 5.0, 7.0, 8.0, 17.0, 18.0, 19.0)]
    for gap, interval in ((0.45, 2), (1.25, 3), (2.25, 4), (90.0, 7)):
        control = closed_loop(target_error=0.05)
        control.observe(2, coordinates, EVEN, [direction * (3.0 - gap)], 0, 0.01)
        assert interval_after(control, 2, len(coordinates)) == interval


@pytest.mark.parametrize(
    "errors, order",
    [
        pytest.param({1: 0.04, 2: 0.01}, 2, id="smooth-output"),
        pytest.param({1: 0.012, 2: 0.022, 3: 0.042}, 1, id="rounding-noise"),
        pytest.param({1: 0.05, 2: 0.05}, 2, id="as-far-takes-the-higher"),
        pytest.param({1: 0.0, 2: 0.0}, 2, id="exact"),
        pytest.param({0: 0.3}, 0, id="one-degree-known"),
        pytest.param({1: math.nan, 2: math.nan}, 2, id="no-numbers"),
    ],
)
def test_closed_loop_goes_on_with_the_order_that_reaches_farthest(errors, order):
    """Reach is (0.05 / e) ** (1 / (D + 1)); within a tenth of the farthest the highest degree wins."""
    assert closed_loop().best_order(errors) == order


@pytest.mark.parametrize(
    "sigmas, kind, runs_over_sigma",
    [
        pytest.param([1.0, 0.9, 0.75, 0.55], "auto", False, id="even-enough"),
        pytest.param([1.0, 0.99, 0.98, 0.5], "auto", True, id="seam"),
        pytest.param([1.0, 0.9, 0.75, 0.55], "sigma", True, id="sigma"),
        pytest.param([1.0, 0.99, 0.98, 0.5], "step", False, id="step"),
        pytest.param([1.0, 0.5, 0.5, 0.1], "sigma", False, id="equal-neighbours"),
        pytest.param([1.0], "auto", False, id="one-step"),
    ],
)
def test_coordinates_of_a_run(sigmas, kind, runs_over_sigma):
    """Auto takes sigma where neighbouring steps differ more than twofold; equal neighbours never serve."""
    tick = Tick(object(), 0, len(sigmas), sigmas, sigmas)
    assert list(tick.coordinates(kind)) == (sigmas if runs_over_sigma else list(range(len(sigmas))))


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
    tick = Tick(object(), 0, len(sigmas), sigmas, sigmas)
    # The last gap is counted twice, so that the mean is 1.
    expected = [weight * len(weights) / sum(weights) for weight in weights]
    assert list(tick.error_weights("latents")) == pytest.approx(expected)


def test_every_step_has_its_weight_where_sigma_has_no_bound():
    """Zero terminal signal: the first sigma is in the thousands, and must not leave the others without weight."""
    scheduler = diffusers.DPMSolverMultistepScheduler(rescale_betas_zero_snr=True)
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(20)
    tick = clock.read(scheduler.timesteps[0])
    assert scheduler.sigmas[0] > 1000
    assert 0.02 < min(tick.error_weights("latents")) < max(tick.error_weights("latents")) < 3
    assert list(tick.coordinates("auto")) == list(range(20))


def test_moves_are_known_of_flows_alone():
    """Beyond sigma 1 the transformer's output is no velocity, though the scheduler takes Euler steps (Cosmos)."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(4)
    moves = clock.read(scheduler.timesteps[0]).moves
    assert list(moves) == pytest.approx((scheduler.sigmas[1:] - scheduler.sigmas[:-1]).tolist())
    scheduler.set_timesteps(4)
    scheduler.sigmas = 80 * scheduler.sigmas
    assert clock.read(scheduler.timesteps[0]).moves is None


def test_closed_loop_adds_up_what_forecasts_move_the_latents():
    """e = 0.01 over one step at order 0: forecasts are off by 0.01, 0.02, 0.03, …, times the weight of their step."""
    for weight, interval in ((1.0, 3), (0.5, 4), (4.0, 2)):
        control = closed_loop(target_error=0.045)
        control.observe(5, range(40), [1.0] * 6 + [weight] * 34, [4], 0, 0.01)
        assert interval_after(control, 5, 40) == interval


def test_closed_loop_survives_equal_coordinates():
    """A scheduler whose noise level stands still gives no gap to judge by: the next step computes."""
    control = closed_loop()
    control.observe(2, [3.0, 2.0, 2.0, 1.0], EVEN, [2.0, 3.0], 1, 0.01)
    assert interval_after(control, 2, 4) == 1


SCHEDULERS = {
    "flow-match-euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "euler": diffusers.EulerDiscreteScheduler,
    "unipc": lambda: diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
    "dpm++": diffusers.DPMSolverMultistepScheduler,
    "ddim-without-step-index": diffusers.DDIMScheduler,
    "ddpm-without-step-index": diffusers.DDPMScheduler,
}


def denoise(scheduler, clock, timesteps=None, *, branches: int = 1, dtype=torch.float32) -> list[Tick]:
    """What the clock reads at each transformer call of a loop as pipelines run it."""
    sample, ticks = torch.ones(1, 1, 4, 4), []
    for timestep in scheduler.timesteps if timesteps is None else timesteps:
        ticks += [clock.read(timestep.to(dtype).expand(1)) for _ in range(branches)]
        sample = scheduler.step(torch.zeros_like(sample), timestep, sample).prev_sample
    return ticks


@pytest.mark.parametrize("branches", [1, 2], ids=["one-branch", "two-branches"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_clock_counts_a_schedulers_steps(name, branches):
    """Every step of a pipeline's loop is read as itself, by all of its branches, with its timestep and noise level."""
    scheduler = SCHEDULERS[name]()
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(8)
    ticks = denoise(scheduler, clock, branches=branches)
    assert [tick.step for tick in ticks] == [step for step in range(8) for _ in range(branches)]
    sigmas = getattr(scheduler, "sigmas", scheduler.timesteps)[:8].tolist()
    if hasattr(scheduler, "sigmas") and max(sigmas) > 1:  # no flow: noise over picture, an angle
        sigmas = [math.atan(sigma) for sigma in sigmas]
    for tick in ticks:
        assert (tick.steps, list(tick.timesteps), list(tick.sigmas)) == (8, scheduler.timesteps.tolist(), sigmas)
        assert tick.repeats is None
        assert tick.run is ticks[0].run


@pytest.mark.parametrize("name", SCHEDULERS)
def test_new_timesteps_are_a_new_run(name):
    """A second generation, with the same timesteps in a new tensor, is another run from step 0, also after an abort."""
    scheduler = SCHEDULERS[name]()
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(6)
    first = denoise(scheduler, clock, scheduler.timesteps[:3])
    scheduler.set_timesteps(6)
    second = denoise(scheduler, clock)
    assert [tick.step for tick in second] == list(range(6))
    assert second[0].run is not first[0].run


def test_clock_follows_a_replaced_scheduler():
    """A user may put another scheduler into the pipeline between runs."""
    holder = {"scheduler": SCHEDULERS["ddpm-without-step-index"]()}
    clock = SchedulerClock(lambda: holder["scheduler"])
    for name, steps in (("ddpm-without-step-index", 4), ("euler", 5)):
        holder["scheduler"] = SCHEDULERS[name]()
        holder["scheduler"].set_timesteps(steps)
        ticks = denoise(holder["scheduler"], clock)
        assert [tick.step for tick in ticks] == list(range(steps))
        assert ticks[0].steps == steps


@pytest.mark.parametrize("name", ["flow-match-euler", "unipc", "ddim-without-step-index"])
def test_image_to_image_counts_from_its_first_step(name):
    """Where a pipeline begins in the middle of the schedule, the run is the rest of it."""
    scheduler = SCHEDULERS[name]()
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(10)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(4)
    ticks = denoise(scheduler, clock, scheduler.timesteps[4:])
    assert [tick.step for tick in ticks] == list(range(6))
    assert ticks[0].steps == 6
    assert list(ticks[0].timesteps) == scheduler.timesteps[4:].tolist()
    assert list(ticks[0].sigmas) == getattr(scheduler, "sigmas", scheduler.timesteps)[4:10].tolist()


def test_timesteps_that_round_alike_are_told_apart():
    """At 200 steps neighbouring timesteps are equal in bfloat16; the step still advances."""
    scheduler = SCHEDULERS["flow-match-euler"]()
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(200)
    assert len(set(scheduler.timesteps.bfloat16().tolist())) < 200
    assert [tick.step for tick in denoise(scheduler, clock, dtype=torch.bfloat16)] == list(range(200))


@pytest.mark.parametrize("scheduler", [diffusers.HeunDiscreteScheduler, diffusers.FlowMatchHeunDiscreteScheduler])
def test_scheduler_of_second_order_repeats(scheduler):
    """A scheduler that runs the transformer twice a step says so, and each call is a step of its own."""
    scheduler = scheduler()
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(4)
    ticks = denoise(scheduler, clock)
    assert [tick.step for tick in ticks] == list(range(len(scheduler.timesteps)))
    assert {tick.repeats for tick in ticks} == {f"{type(scheduler).__name__} repeats timesteps (order 2)"}


def test_call_after_the_last_step_stays_in_the_schedule():
    """The transformer may be called on its own after a run; that call has a timestep and a noise level too."""
    scheduler = SCHEDULERS["flow-match-euler"]()
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(4)
    denoise(scheduler, clock)
    tick = clock.read(500.0)
    assert 0 <= tick.step < tick.steps


def test_timestep_of_each_token_counts_by_its_maximum():
    """Wan's ``expand_timesteps`` gives a timestep for every token, 0 where the picture is given."""
    scheduler = SCHEDULERS["ddpm-without-step-index"]()
    clock = SchedulerClock(lambda: scheduler)
    scheduler.set_timesteps(3)
    steps = [clock.read(torch.stack([torch.zeros(()), t, torch.zeros(())])).step for t in scheduler.timesteps]
    assert steps == [0, 1, 2]


def test_timestep_clock_takes_the_nearest():
    """A loop's timesteps are found again after rounding, as numbers and as tensors of any shape."""
    clock = TimestepClock(torch.tensor([1000.0, 752.0, 421.5, 3.0]))
    ticks = [clock.read(t) for t in (1000, 753.9, torch.tensor([0.0, 422.0]), torch.tensor(2.0))]
    assert [tick.step for tick in ticks] == [0, 1, 2, 3]
    assert {tick.run for tick in ticks} == {ticks[0].run}
    assert ticks[0].steps == 4
    assert list(ticks[0].timesteps) == list(ticks[0].sigmas) == [1000.0, 752.0, 421.5, 3.0]


@pytest.mark.parametrize("stopped_at", [2, 3])
def test_timestep_clock_starts_again(stopped_at):
    """A loop that is back at an earlier timestep is a new run, whether it came to its end or not."""
    timesteps = [900.0, 600.0, 300.0]
    clock = TimestepClock(timesteps)
    first = [clock.read(t) for t in timesteps[:stopped_at] for _ in range(2)]
    second = [clock.read(t) for t in timesteps for _ in range(2)]
    assert [tick.step for tick in second] == [0, 0, 1, 1, 2, 2]
    assert len({tick.run for tick in first}) == len({tick.run for tick in second}) == 1
    assert first[0].run is not second[0].run


@pytest.mark.parametrize(
    "timesteps", [[], [3.0, 3.0, 1.0], torch.tensor([5, 2, 2])], ids=["none", "equal", "equal-last"]
)
def test_timesteps_that_tell_nothing_are_refused(timesteps):
    """No timesteps, or equal neighbours, are an error."""
    with pytest.raises(UnsupportedError, match="non-empty sequence without equal neighbours"):
        TimestepClock(timesteps)
