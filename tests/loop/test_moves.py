"""Contribution of each step's output to the result of a run, derived from the scheduler."""

import copy
import random
from itertools import pairwise, product

import diffusers
import numpy as np
import pytest
import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.moves import sampler_moves, try_out
from tests.loop.euler import euler_moves

STEPS = 12
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 5.0}


def unipc(**config):
    return diffusers.UniPCMultistepScheduler(**FLOW, **config)


def dpm(**config):
    return diffusers.DPMSolverMultistepScheduler(**FLOW, **config)


LINEAR = {
    "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    **{f"unipc-order-{order}": lambda order=order: unipc(solver_order=order) for order in (1, 2, 3)},
    "unipc-without-corrector": lambda: unipc(disable_corrector=list(range(STEPS))),
    "unipc-with-late-corrector": lambda: unipc(disable_corrector=[0, 1, 2]),
    **{f"dpm++-order-{order}": lambda order=order: dpm(solver_order=order) for order in (1, 2, 3)},
    "deis": lambda: diffusers.DEISMultistepScheduler(**FLOW),
    "ddim": lambda: diffusers.DDIMScheduler(clip_sample=False),
}


def ready(scheduler, first: int = 0):
    scheduler.set_timesteps(STEPS)
    if first and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    return scheduler


def latents_of(scheduler, outputs: torch.Tensor, first: int) -> torch.Tensor:
    """The latents of a run with these outputs, float64 [steps, …], at its start and after each step."""
    scheduler = ready(scheduler, first)
    latents = torch.linspace(-1, 1, outputs[0].numel(), dtype=torch.float64).view_as(outputs[0])
    course = [latents]
    for timestep, output in zip(scheduler.timesteps[first:], outputs, strict=True):
        course.append(scheduler.step(output, timestep, course[-1], return_dict=False)[0])
    return torch.stack(course)


@pytest.mark.parametrize("first", [0, 5], ids=["from-noise", "from-an-image"])
@pytest.mark.parametrize("name", LINEAR)
def test_moves_are_the_derivatives_of_a_run(name, first):
    moves = torch.tensor(try_out(ready(LINEAR[name](), first), first).moves, dtype=torch.float64)
    outputs = torch.randn(STEPS - first, 1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    latents = latents_of(LINEAR[name](), outputs, first)
    assert moves.shape == (len(outputs) + 1, len(outputs))
    for step in range(len(outputs)):
        changed = outputs.clone()
        changed[step] += 10
        difference = (latents_of(LINEAR[name](), changed, first) - latents) / 10
        expected = moves[:, step].view(-1, 1, 1, 1).expand_as(difference)
        torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0, 5], ids=["from-noise", "from-an-image"])
def test_eulers_moves_are_steps_in_sigma(first):
    """The trial finds them."""
    scheduler = ready(LINEAR["euler"](), first)
    known = torch.tensor(euler_moves(scheduler.sigmas[first:].tolist()))
    torch.testing.assert_close(torch.tensor(try_out(scheduler, first).moves), known, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["unipc-order-2", "dpm++-order-2", "deis"])
def test_a_flows_moves_add_up_to_the_whole_way(name):
    """An output that stays the same moves the latents along a straight line, as far as sigma falls."""
    scheduler = ready(LINEAR[name]())
    whole = float(scheduler.sigmas[-1] - scheduler.sigmas[0])
    assert sum(try_out(scheduler).moves[-1]) == pytest.approx(whole, abs=1e-4)


def euler_class(step):
    """A subclass of Euler's scheduler whose latents go through a function of the scheduler and the next latents."""
    Euler = diffusers.FlowMatchEulerDiscreteScheduler

    class OfTheUsers(Euler):
        def step(self, model_output, timestep, sample, return_dict=True):
            return (step(self, Euler.step(self, model_output, timestep, sample, return_dict=False)[0]),)

    return OfTheUsers


def of_its_step(scheduler, latents):
    return latents + 0.1 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(scheduler.step_index))


class TakesMore(diffusers.FlowMatchEulerDiscreteScheduler):
    def step(self, model_output, old_output, timestep, sample, return_dict=True):
        return super().step(model_output, timestep, sample, return_dict=return_dict)


class TakesImages(diffusers.FlowMatchEulerDiscreteScheduler):
    def step(self, model_output, timestep, sample, return_dict=True):
        _batch, _channels, _height, _width = sample.shape
        return super().step(model_output, timestep, sample, return_dict=return_dict)


NOT_LINEAR = {
    "ddpm": lambda: diffusers.DDPMScheduler(clip_sample=True),
    "clipped": lambda: diffusers.DDIMScheduler(clip_sample=True),
    "thresholds-dpm++": lambda: dpm(thresholding=True),
    "thresholds-unipc": lambda: unipc(thresholding=True),
    "takes-old-outputs": diffusers.CogVideoXDPMScheduler,
    "clamps": euler_class(lambda self, latents: latents.clamp(-50, 50)),
    "noise-that-never-repeats": euler_class(
        lambda self, latents: latents + torch.randn(latents.shape, generator=(g := torch.Generator(), g.seed())[0])
    ),
}
NOISY = {
    "sde": lambda: dpm(algorithm_type="sde-dpmsolver++"),
    "ancestral": diffusers.LTXEulerAncestralRFScheduler,
    "torchs-noise": euler_class(lambda self, latents: latents + 0.1 * torch.randn_like(latents)),
    "numpys-noise": euler_class(
        lambda self, latents: latents + 0.1 * torch.from_numpy(np.random.randn(*latents.shape))
    ),
    "noise-of-the-step": euler_class(of_its_step),
}
ANEW = {
    "stochastic": lambda: diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    "few-step": diffusers.FlowMatchLCMScheduler,
    "few-step-of-noise": diffusers.LCMScheduler,
    "trigonometric": diffusers.SCMScheduler,
}
BASES = {"takes-more": TakesMore, "takes-images": TakesImages}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_steps_that_are_no_sum_have_no_moves(name):
    """Clipping, and steps that take something else, are found out."""
    assert try_out(ready(NOT_LINEAR[name]())).moves is None


@pytest.mark.parametrize(
    "name, first", [*product([*LINEAR, *NOISY, *ANEW], [0]), *product(["few-step", "few-step-of-noise"], [5])]
)
def test_noise_of_steps_is_measured(name, first):
    """Noise is a share of all noise in the latents, whatever draws it; classes are not asked."""
    scheduler = {**LINEAR, **NOISY, **ANEW}[name]()
    scheduler.set_timesteps(2 if name == "trigonometric" else STEPS)
    noise = try_out(scheduler, first).noise
    assert noise == 0 if name in LINEAR else noise > 0.95 if name in ANEW else 0.1 < noise < 0.95


@pytest.mark.parametrize("name", ["torchs-noise", "numpys-noise", "noise-of-the-step", *BASES])
def test_noise_does_not_hide_the_moves(name):
    """A step's noise is subtracted; a step that takes other arguments has the moves of its base class."""
    scheduler = ready({**NOISY, **BASES}[name]())
    known = torch.tensor(euler_moves(scheduler.sigmas.tolist()))
    torch.testing.assert_close(torch.tensor(try_out(scheduler).moves), known, rtol=0, atol=1e-5)


class Replaced:
    """A scheduler's step with noise of its own generators, which counts its calls."""

    def __init__(self, step):
        self.step, self.calls, self.generator = step, 0, np.random.default_rng(0)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        latents = self.step(*args, **kwargs)[0]
        return (latents + 0.1 * torch.from_numpy(self.generator.standard_normal(latents.shape)),)

    def state(self):
        return self.calls, self.generator.bit_generator.state


def replaced_by_a_function(step):
    """The same with variables of a function, and a function that reads them."""
    calls, generator = 0, torch.Generator().manual_seed(0)

    def noisy(*args, **kwargs):
        nonlocal calls
        calls += 1
        latents = step(*args, **kwargs)[0]
        return (latents + 0.1 * torch.randn(latents.shape, generator=generator),)

    noisy.state = lambda: (calls, generator.get_state().tolist())
    return noisy


@pytest.mark.parametrize("replace", [Replaced, replaced_by_a_function], ids=["object", "function"])
def test_a_replaced_step_is_tried_on_a_copy(replace):
    """The noise of a step that is set on the scheduler is found, and neither changes."""
    scheduler = ready(diffusers.FlowMatchEulerDiscreteScheduler())
    scheduler.step = replace(scheduler.step)
    before = scheduler.step.state()
    trial = try_out(scheduler)
    assert trial.moves is not None and trial.noise > 0.1
    assert scheduler.step.state() == before and scheduler.step_index is None


@pytest.mark.parametrize("name", [*LINEAR, *NOISY, *ANEW])
def test_the_scheduler_stays_as_it_is(name):
    """The trial leaves no trace on the scheduler, nor on random numbers."""
    scheduler = {**LINEAR, **NOISY, **ANEW}[name]()
    scheduler.set_timesteps(2 if name == "trigonometric" else STEPS)
    before, states = copy.deepcopy(vars(scheduler)), (torch.get_rng_state(), np.random.get_state()[1].copy())
    pythons, timesteps = random.getstate(), scheduler.timesteps
    try_out(scheduler)
    assert scheduler.timesteps is timesteps and random.getstate() == pythons
    assert torch.equal(torch.get_rng_state(), states[0]) and (np.random.get_state()[1] == states[1]).all()
    assert vars(scheduler).keys() == before.keys()
    for key, value in vars(scheduler).items():
        assert torch.equal(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key], key


def test_another_thread_draws_new_numbers(monkeypatch):
    """Steps that draw nothing neither set nor restore the random state, which all threads share."""
    kind = diffusers.FlowMatchEulerDiscreteScheduler

    def step(*args, original=kind.step, **kwargs):
        torch.rand(1)  # as another thread may do during the step
        return original(*args, **kwargs)

    monkeypatch.setattr(kind, "step", step)
    state, expected = torch.get_rng_state(), torch.rand(STEPS + 1)[-1]
    torch.set_rng_state(state)
    try_out(ready(kind()))
    assert torch.rand(1) == expected


SIGMAS = [1.0, 0.8, 0.5, 0.3, 0.0]


def euler_sampler(model, latents):
    for sigma, following in pairwise(SIGMAS):
        latents = latents + (latents - model(latents, sigma)) / sigma * (following - sigma)
    return latents


def test_moves_of_a_sampler_that_calls_its_model():
    """A trial of Euler's steps finds their known moves, and does not change random numbers."""
    state = torch.get_rng_state()
    torch.testing.assert_close(
        torch.tensor(sampler_moves(euler_sampler, SIGMAS)), torch.tensor(euler_moves(SIGMAS)), atol=1e-6, rtol=0
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "sample, reason",
    [
        pytest.param(lambda model, x: model(model(x, 1.0), 0.9), "between the steps", id="between-the-steps"),
        pytest.param(lambda model, x: model(model(x, 1.0), 1.0), "more than once a step", id="twice"),
        pytest.param(lambda model, x: model(x, 1.0), "every step", id="too-few"),
        pytest.param(lambda model, x: euler_sampler(model, x) + torch.randn_like(x), "draws noise", id="noise"),
        pytest.param(lambda model, x: euler_sampler(model, x).clamp(-1, 1), "more than to add up", id="clips"),
    ],
)
def test_samplers_that_are_no_sum_are_refused(sample, reason):
    """The reason names the part of the sampler that cannot be forecast."""
    with pytest.raises(UnsupportedError, match=reason):
        sampler_moves(sample, SIGMAS)
