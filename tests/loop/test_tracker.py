"""Clocks find the step that a denoising loop is at."""

import math

import diffusers
import pytest
import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.growth import error_weights
from dit_accel.loop.tracker import Place, PlaceClock, SchedulerClock, SigmaClock, Tick, TimestepClock

Euler = diffusers.FlowMatchEulerDiscreteScheduler
SCHEDULERS = {
    "flow-match-euler": lambda: Euler(shift=3.0),
    "euler": diffusers.EulerDiscreteScheduler,
    "unipc": lambda: diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
    "dpm++": diffusers.DPMSolverMultistepScheduler,
    "ddim-without-step-index": diffusers.DDIMScheduler,
    "ddpm-without-step-index": diffusers.DDPMScheduler,
}


def begun(scheduler, steps: int, first: int = 0):
    """A scheduler, by its name or itself, at the first step of a run, and its clock."""
    scheduler = SCHEDULERS[scheduler]() if isinstance(scheduler, str) else scheduler
    scheduler.set_timesteps(steps)
    if first and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    return scheduler, SchedulerClock(lambda: scheduler)


def denoise(scheduler, clock, timesteps=None, *, branches: int = 1, shown=lambda timestep: timestep) -> list[Tick]:
    """Clock readings at each transformer call of a loop, as pipelines run it, which shows timesteps in its own way."""
    sample, ticks = torch.ones(1, 1, 4, 4), []
    for timestep in scheduler.timesteps if timesteps is None else timesteps:
        ticks += [clock.read(shown(timestep).expand(1)) for _ in range(branches)]
        sample = scheduler.step(torch.zeros_like(sample), timestep, sample).prev_sample
    return ticks


@pytest.mark.parametrize(
    "sigmas, kind, runs_over_sigma",
    [
        pytest.param([1.0, 0.9, 0.75, 0.55], "auto", False, id="even-enough"),
        pytest.param([1.0, 0.99, 0.98, 0.5], "auto", True, id="seam"),
        pytest.param([1.0, 0.52, 0.51, 0.5], "auto", True, id="seam-to-shorter-steps"),
        pytest.param([0.5, 0.98, 0.99, 1.0], "auto", True, id="seam-upwards"),
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


def test_every_step_has_its_weight_where_sigma_has_no_bound():
    """Zero terminal signal: the first sigma is in the thousands, and must not leave the others without weight."""
    scheduler, clock = begun(diffusers.DPMSolverMultistepScheduler(rescale_betas_zero_snr=True), 20)
    tick = clock.read(scheduler.timesteps[0])
    assert scheduler.sigmas[0] > 1000
    weights = error_weights(tick.sigmas)
    assert 0.02 < min(weights) < max(weights) < 6 and list(tick.coordinates("auto")) == list(range(20))


def test_a_run_that_was_not_read_is_missed():
    holder = {"scheduler": Euler()}
    scheduler, clock = holder["scheduler"], SchedulerClock(lambda: holder["scheduler"])
    assert not clock.missed_run
    for _ in range(2):
        scheduler.set_timesteps(4)
        assert not clock.missed_run
        scheduler.step(torch.ones(1), scheduler.timesteps[0], torch.ones(1))
        assert clock.missed_run
        clock.read(scheduler.timesteps[1])
        assert not clock.missed_run
    scheduler.set_timesteps(4)
    scheduler.step(torch.ones(1), scheduler.timesteps[0], torch.ones(1))
    holder["scheduler"] = Euler()
    assert not clock.missed_run


def test_moves_are_known_of_flows_alone():
    """Beyond sigma 1 the transformer's output is no velocity, though the scheduler takes Euler steps (Cosmos)."""
    scheduler, clock = begun(Euler(), 4)
    moves = clock.read(scheduler.timesteps[0]).moves
    assert moves[-1] == pytest.approx((scheduler.sigmas[1:] - scheduler.sigmas[:-1]).tolist())
    scheduler.set_timesteps(4)
    scheduler.sigmas = 80 * scheduler.sigmas
    assert clock.read(scheduler.timesteps[0]).moves is None


@pytest.mark.parametrize("first", [0, 3], ids=["from-noise", "from-an-image"])
@pytest.mark.parametrize(
    "name, known", [("flow-match-euler", True), ("unipc", True), ("dpm++", False), ("ddim-without-step-index", False)]
)
def test_moves_of_a_run(name, known, first):
    """Linear schedulers of flows have them, for the steps of the run alone and as long as it lasts."""
    scheduler, clock = begun(name, 8, first)
    ticks = denoise(scheduler, clock, scheduler.timesteps[first:])
    assert all(tick.moves is ticks[0].moves for tick in ticks) and (ticks[0].moves is not None) == known
    if known:
        assert [len(row) for row in ticks[0].moves] == [8 - first] * (9 - first)


@pytest.mark.parametrize("branches", [1, 2], ids=["one-branch", "two-branches"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_clock_counts_a_schedulers_steps(name, branches):
    """Every step of a pipeline's loop is read as itself, by all of its branches, with its timestep and noise level."""
    scheduler, clock = begun(name, 8)
    ticks = denoise(scheduler, clock, branches=branches)
    assert [tick.step for tick in ticks] == [step for step in range(8) for _ in range(branches)]
    sigmas = getattr(scheduler, "sigmas", scheduler.timesteps)[:8].tolist()
    if hasattr(scheduler, "sigmas") and max(sigmas) > 1:  # no flow: noise over image, a share of the right angle
        sigmas = [math.atan(sigma) / (math.pi / 2) for sigma in sigmas]
    for tick in ticks:
        assert (tick.steps, list(tick.timesteps), list(tick.sigmas)) == (8, scheduler.timesteps.tolist(), sigmas)
        assert tick.plain is None and tick.run is ticks[0].run


def test_a_run_from_the_middle_has_the_noise_levels_of_the_whole():
    """Ratios of noise to image below π / 2 are no flow's levels, also where a run has no larger ones (img2img)."""
    (first, *_) = denoise(*(whole := begun("euler", 8)))
    begin = next(step for step, sigma in enumerate(whole[0].sigmas.tolist()) if sigma < 1.0)
    scheduler, clock = begun("euler", 8, begin)
    tick = clock.read(scheduler.timesteps[begin])
    assert tick.sigmas == first.sigmas[begin:]
    weights = error_weights(first.sigmas)[begin:]
    assert error_weights(tick.sigmas) == pytest.approx([weight * len(weights) / sum(weights) for weight in weights])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_new_timesteps_are_a_new_run(name):
    """A second generation, with the same timesteps in a new tensor, is another run from step 0, also after an abort."""
    scheduler, clock = begun(name, 6)
    first = denoise(scheduler, clock, scheduler.timesteps[:3])
    scheduler.set_timesteps(6)
    second = denoise(scheduler, clock)
    assert [tick.step for tick in second] == list(range(6)) and second[0].run is not first[0].run


def test_clock_follows_a_replaced_scheduler():
    """A user may put another scheduler into the pipeline between runs."""
    holder = {"scheduler": SCHEDULERS["ddpm-without-step-index"]()}
    clock = SchedulerClock(lambda: holder["scheduler"])
    for name, steps in (("ddpm-without-step-index", 4), ("euler", 5)):
        holder["scheduler"], _ = begun(name, steps)
        ticks = denoise(holder["scheduler"], clock)
        assert [tick.step for tick in ticks] == list(range(steps)) and ticks[0].steps == steps


@pytest.mark.parametrize("name", ["flow-match-euler", "unipc", "ddim-without-step-index"])
def test_image_to_image_counts_from_its_first_step(name):
    scheduler, clock = begun(name, 10, 4)
    ticks = denoise(scheduler, clock, scheduler.timesteps[4:])
    assert [tick.step for tick in ticks] == list(range(6)) and ticks[0].steps == 6
    assert list(ticks[0].timesteps) == scheduler.timesteps[4:].tolist()
    assert list(ticks[0].sigmas) == getattr(scheduler, "sigmas", scheduler.timesteps)[4:10].tolist()


@pytest.mark.parametrize("name", ["flow-match-euler", "unipc", "ddim-without-step-index"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_start_in_the_middle_is_found_by_a_rounded_timestep(name, dtype):
    """A pipeline that starts at a later step without notice is recognised by its first timestep, in its own dtype.

    The last step is an exception: its timestep may be at most 1, like shares of 1000.
    """
    for first in range(9):
        scheduler, clock = begun(name, 10)
        tick = clock.read(scheduler.timesteps[first].to(dtype).expand(1))
        assert (tick.step, tick.steps) == (0, 10 - first)
        assert list(tick.timesteps) == scheduler.timesteps[first:].tolist()


def test_timesteps_that_round_alike_are_told_apart():
    """At 200 steps neighbouring timesteps are equal in bfloat16; the step still advances."""
    scheduler, clock = begun("flow-match-euler", 200)
    assert len(set(scheduler.timesteps.bfloat16().tolist())) < 200
    assert [tick.step for tick in denoise(scheduler, clock, shown=torch.Tensor.bfloat16)] == list(range(200))


Heun = diffusers.FlowMatchHeunDiscreteScheduler
OwnHeun = type("OwnHeun", (Heun,), {"order": 1})
TWO_CALLS = [diffusers.HeunDiscreteScheduler, Heun, OwnHeun, diffusers.KDPM2DiscreteScheduler]


@pytest.mark.parametrize("scheduler", TWO_CALLS)
def test_scheduler_of_second_order_repeats(scheduler):
    """A scheduler that runs the transformer twice per step is found by its steps, and each call counts as a step."""
    scheduler, clock = begun(scheduler(), 4)
    ticks = denoise(scheduler, clock)
    assert [tick.step for tick in ticks] == list(range(len(scheduler.timesteps)))
    assert {tick.plain for tick in ticks} == {f"{type(scheduler).__name__} repeats timesteps (order 2)"}


def plain_of(scheduler, steps: int) -> str | None:
    scheduler, clock = begun(scheduler, steps)
    return clock.read(scheduler.timesteps[0]).plain


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param(type("Own", (Euler,), {"order": 2})(), id="order-of-a-multistep-scheduler"),
        pytest.param(diffusers.PNDMScheduler(skip_prk_steps=True), id="one-timestep-twice"),
        pytest.param(diffusers.EulerAncestralDiscreteScheduler(), id="some-noise"),
        pytest.param(
            diffusers.UniPCMultistepScheduler(
                use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=50.0, final_sigmas_type="zero"
            ),
            id="timesteps-that-round-alike",
        ),
    ],
)
def test_other_schedulers_are_forecast(scheduler):
    """Neither a number of the scheduler nor single equal timesteps make a scheduler one that calls twice a step."""
    assert plain_of(scheduler, 30) is None


def test_steps_of_no_length_are_no_stages():
    """A user's schedule may stay at a noise level; its outputs there change nothing."""
    scheduler = Euler()
    scheduler.set_timesteps(sigmas=[1.0, 0.8, 0.8, 0.5, 0.5, 0.3])
    tick = SchedulerClock(lambda: scheduler).read(scheduler.timesteps[0])
    assert tick.plain is None and tick.noisy is None


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.LCMScheduler,
        diffusers.FlowMatchLCMScheduler,
        diffusers.SCMScheduler,
        lambda: Euler(stochastic_sampling=True),
        lambda: diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
    ],
    ids=["lcm", "flow-lcm", "scm", "stochastic", "sde-of-few-steps"],
)
def test_schedulers_that_draw_all_noise_anew(scheduler):
    """Consistency models' schedulers do so, and stochastic ones of few steps."""
    scheduler = scheduler()
    assert plain_of(scheduler, 2) == f"{type(scheduler).__name__} draws the noise of the latents anew at every step"


def test_noise_of_a_users_step_is_told():
    """A replaced step that adds noise is not known by its class; its outputs are forecast, with a remark."""
    scheduler, clock = begun("flow-match-euler", 20)
    own = scheduler.step
    scheduler.step = lambda *args, **kwargs: (own(*args, **kwargs)[0] + 0.1 * torch.randn(args[0].shape),)
    tick = clock.read(scheduler.timesteps[0])
    assert tick.plain is None and tick.moves is not None
    assert tick.noisy.startswith("FlowMatchEulerDiscreteScheduler adds noise at every step")


def test_call_after_the_last_step_stays_in_the_schedule():
    """The transformer may be called on its own after a run; that call has a timestep and a noise level too."""
    scheduler, clock = begun("flow-match-euler", 4)
    denoise(scheduler, clock)
    tick = clock.read(500.0)
    assert 0 <= tick.step < tick.steps


def test_a_given_place_tells_steps_that_nothing_else_tells():
    """A loop that steps a copy of its scheduler leaves the pipeline's where it was; a second loop is a new run."""
    scheduler, clock = begun(Euler(), 4)
    ticks = [clock.read(timestep, Place(step)) for _ in range(2) for step, timestep in enumerate(scheduler.timesteps)]
    assert [tick.step for tick in ticks] == [0, 1, 2, 3] * 2
    assert len({id(tick.run) for tick in ticks}) == 2 and ticks[0].run is ticks[3].run
    scheduler.set_timesteps(4)
    scheduler.set_begin_index(2)
    ticks = [clock.read(timestep, Place(step)) for step, timestep in enumerate(scheduler.timesteps[2:])]
    assert [(tick.step, tick.steps) for tick in ticks] == [(0, 2), (1, 2)]


def test_a_given_place_goes_before_the_timestep():
    """Timesteps that a loop rescales count too, and the noise levels of the known ones stay."""
    clock = TimestepClock([1000.0, 500.0, 250.0])
    ticks = [clock.read(value, Place(step, 3)) for step, value in enumerate((1.0, 0.5, 0.25))]
    assert [tick.step for tick in ticks] == [0, 1, 2] and list(ticks[0].sigmas) == [1000.0, 500.0, 250.0]


def test_a_place_alone_is_enough():
    clock = PlaceClock()
    ticks = [clock.read(0.0, Place(step, 4)) for _ in range(2) for step in range(4)] + [clock.read(0.0, Place(3, 5))]
    assert [(tick.step, tick.steps) for tick in ticks] == [*[(step, 4) for step in range(4)] * 2, (3, 5)]
    assert len({id(tick.run) for tick in ticks}) == 3
    for place in (None, Place(0), Place(4, 4)):
        with pytest.raises(UnsupportedError, match=r"cache_context.*step_index.*num_inference_steps"):
            clock.read(0.0, place)


def test_timestep_of_each_token_counts_by_its_maximum():
    """Wan's ``expand_timesteps`` gives a timestep for every token, 0 where the image is given."""
    scheduler, clock = begun("ddpm-without-step-index", 3)
    steps = [clock.read(torch.stack([torch.zeros(()), t, torch.zeros(())])).step for t in scheduler.timesteps]
    assert steps == [0, 1, 2]


def test_timestep_clock_takes_the_nearest():
    """A loop's timesteps are found again after rounding, as numbers and as tensors of any shape."""
    clock = TimestepClock(torch.tensor([1000.0, 752.0, 421.5, 3.0]))
    ticks = [clock.read(t) for t in (1000, 753.9, torch.tensor([0.0, 422.0]), torch.tensor(2.0))]
    assert [tick.step for tick in ticks] == [0, 1, 2, 3]
    assert {tick.run for tick in ticks} == {ticks[0].run} and ticks[0].steps == 4
    assert list(ticks[0].timesteps) == list(ticks[0].sigmas) == [1000.0, 752.0, 421.5, 3.0]


def test_timestep_clock_finds_rounded_timesteps_of_any_spacing():
    """Steps that are close together at the end do not narrow bfloat16's tolerance for those far apart."""
    timesteps = [1000.0, 701.7, 333.3, 1.0, 0.5]
    clock, rounded = TimestepClock(timesteps), torch.tensor(timesteps).bfloat16()
    assert max(abs(value - timestep) for value, timestep in zip(rounded.tolist(), timesteps, strict=True)) > 0.5
    assert [clock.read(value).step for value in rounded] == list(range(5))


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


VALUES, NUMBERS = "non-empty sequence without equal neighbours", "timesteps must be a sequence of numbers, got "


@pytest.mark.parametrize(
    "timesteps, message",
    [([], VALUES), ([3.0, 3.0, 1.0], VALUES), (torch.tensor([5, 2, 2]), VALUES)]
    + [(value, NUMBERS) for value in (50, "abc", None)],
    ids=str,
)
def test_timesteps_that_tell_nothing_are_refused(timesteps, message):
    """No timesteps, equal neighbours, or no sequence of numbers: a count in the place of the values, for one."""
    with pytest.raises(UnsupportedError, match=message):
        TimestepClock(timesteps)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("rescaled", [lambda t: t / 1000, lambda t: 1 - t / 1000], ids=["share", "from-0-to-1"])
def test_rescaled_timesteps_begin_at_the_start(rescaled, shift):
    """Under shift 1 the first, 1000 of 1000, is as large as the last of the schedule."""
    assert [tick.step for tick in denoise(*begun(Euler(shift=shift), 8), shown=rescaled)] == list(range(8))


@pytest.mark.parametrize("first", [3, 7], ids=["in-the-middle", "at-the-last"])
def test_where_a_run_begins_is_confirmed(first):
    """Timesteps in a pipeline's own scale may be misleading; the scheduler's first step index corrects the start."""
    scheduler, clock = begun("flow-match-euler", 8)
    ticks = denoise(scheduler, clock, shown=lambda _: scheduler.timesteps[first])
    assert [tick.step for tick in ticks[1:]] == list(range(7)) and {tick.steps for tick in ticks[1:]} == {7}
    assert ticks[0].run is not ticks[1].run and {tick.run for tick in ticks[1:]} == {ticks[1].run}


def test_a_start_that_nothing_tells_is_found_at_the_second_step():
    """In image-to-image with rescaled timesteps and no begin index, the run is the rest of the schedule."""
    scheduler, clock = begun("flow-match-euler", 10)
    ticks = denoise(scheduler, clock, scheduler.timesteps[4:], shown=lambda timestep: timestep / 1000)
    assert [(tick.step, tick.steps) for tick in ticks] == [(0, 10), *((step, 5) for step in range(5))]


def test_steps_that_go_back_are_a_new_run():
    """A pipeline may take the same timesteps once more, as for the next part of a video."""
    scheduler, clock = begun("flow-match-euler", 6)
    runs = []
    for _ in range(2):
        scheduler.set_begin_index(0)
        scheduler._step_index = None
        runs.append(denoise(scheduler, clock))
    assert [tick.step for ticks in runs for tick in ticks] == 2 * list(range(6))
    assert runs[0][0].run is not runs[1][0].run


def test_sigmas_tell_the_step_of_a_sampler():
    """Rounding is no other step, a noise level between the steps is none, and going back begins a new run."""
    sigmas = [1.0, 0.75, 0.5, 0.0]
    clock = SigmaClock(sigmas, is_flow=True, moves=(moves := [[0.0]]))
    assert clock.step_at(0.6) is None and clock.step_at(0.75001) == 1
    first, second = clock.read(torch.tensor([1.0, 1.0])), clock.read(0.75)
    assert (first.step, second.step, second.steps, list(second.sigmas)) == (0, 1, 3, sigmas[:-1])
    assert first.run is second.run and second.moves is moves and second.plain is None
    assert clock.read(1.0).run is not first.run
    with pytest.raises(UnsupportedError, match=r"0.6 is none of \[1.0, 0.75, 0.5\]"):
        clock.read(0.6)


@pytest.mark.parametrize("first", [0, 3], ids=["from-noise", "from-an-image"])
def test_sigmas_of_noise_over_picture_are_shares_of_an_angle(first):
    """A model that predicts noise is never taken for a flow, wherever its run begins; nothing of it is corrected."""
    sigmas = [14.6, 5.0, 2.0, 0.9, 0.3, 0.0][first:]
    tick = SigmaClock(sigmas, is_flow=False, moves=[[0.0]]).read(sigmas[0])
    assert tick.sigmas == pytest.approx([2 / math.pi * math.atan(sigma) for sigma in sigmas[:-1]])
    assert tick.moves is None


@pytest.mark.parametrize("sigmas", [[1.0, 0.5, 0.5, 0.0], [0.2, 0.4, 0.6], [1.0, 0.0, 0.0]])
def test_sigmas_that_do_not_fall_run_plainly(sigmas):
    """Steps that cannot be distinguished are computed."""
    assert "do not fall" in SigmaClock(sigmas, is_flow=True).read(sigmas[0]).plain
