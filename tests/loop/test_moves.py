"""Contribution of each step's output to the result of a run, derived from the scheduler."""

import copy
from itertools import pairwise

import diffusers
import pytest
import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.moves import euler_moves, linear_moves, sampler_moves

# diffusers' own, at the construction of a scheduler and in the steps of DEIS
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
]

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
    """A change of an output changes the latents of a run by the change times its move."""
    moves = torch.tensor(linear_moves(ready(LINEAR[name](), first), first), dtype=torch.float64)
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
def test_eulers_moves_are_known_without_a_trial(first):
    """They are steps in sigma; the trial finds the same."""
    scheduler = ready(LINEAR["euler"](), first)
    known = torch.tensor(euler_moves(scheduler.sigmas[first:].tolist()))
    torch.testing.assert_close(torch.tensor(linear_moves(scheduler, first)), known, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["unipc-order-2", "dpm++-order-2", "deis"])
def test_a_flows_moves_add_up_to_the_whole_way(name):
    """An output that stays the same moves the latents along a straight line, as far as sigma falls."""
    scheduler = ready(LINEAR[name]())
    whole = float(scheduler.sigmas[-1] - scheduler.sigmas[0])
    assert sum(linear_moves(scheduler)[-1]) == pytest.approx(whole, abs=1e-4)


class TakesMore(diffusers.FlowMatchEulerDiscreteScheduler):
    def step(self, model_output, old_output, timestep, sample, return_dict=True):
        return super().step(model_output, timestep, sample, return_dict=return_dict)


class OfTheUsers(diffusers.FlowMatchEulerDiscreteScheduler):
    def step(self, model_output, timestep, sample, return_dict=True):
        return super().step(model_output.clamp(-50, 50), timestep, sample, return_dict=return_dict)


NOT_LINEAR = {
    "sde": lambda: dpm(algorithm_type="sde-dpmsolver++"),
    "stochastic": lambda: diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    "few-step": diffusers.FlowMatchLCMScheduler,
    "ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "ddpm": lambda: diffusers.DDPMScheduler(clip_sample=False),
    "clipped": lambda: diffusers.DDIMScheduler(clip_sample=True),
    "thresholds-dpm++": lambda: dpm(thresholding=True),
    "thresholds-unipc": lambda: unipc(thresholding=True),
    "takes-old-outputs": diffusers.CogVideoXDPMScheduler,
    "takes-more": TakesMore,
    "clamps-outputs": OfTheUsers,
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_steps_that_are_no_sum_have_no_moves(name):
    """Noise, clipping and steps that take something else are found out."""
    assert linear_moves(ready(NOT_LINEAR[name]())) is None


@pytest.mark.parametrize("name", [*LINEAR, "sde", "stochastic"])
def test_the_scheduler_stays_as_it_is(name):
    """The trial leaves no trace on the scheduler, nor on torch's random numbers."""
    scheduler = ready({**LINEAR, **NOT_LINEAR}[name]())
    before, random = copy.deepcopy(vars(scheduler)), torch.get_rng_state()
    timesteps = scheduler.timesteps
    linear_moves(scheduler)
    assert scheduler.timesteps is timesteps
    assert torch.equal(torch.get_rng_state(), random)
    assert vars(scheduler).keys() == before.keys()
    for key, value in vars(scheduler).items():
        assert torch.equal(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key], key


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
