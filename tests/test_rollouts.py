"""Rollouts of reinforcement learning: samples of a stochastic sampler, with the log-probability of each step.

A trainer samples under ``torch.no_grad()`` and computes the log-probabilities again with gradients. Their ratio is 1
before the first update if both runs of the transformer return the same velocity.
"""

import warnings

import pytest
import torch

from dit_accel import accelerate_transformer
from tests.models.test_transformer import recorded_calls
from tests.tiny import tiny_pipeline

STEPS = 12
TIMES = torch.linspace(1, 1 / STEPS, STEPS)
SPREAD = 0.3  # standard deviation of a step's noise, for a step of length 1


def velocity(transformer, arguments, x, step):
    return transformer(
        **arguments | {"hidden_states": x, "timestep": TIMES[step].expand(len(x)), "return_dict": False}
    )[0]


def moved(x, velocity):
    """Mean of the next state."""
    return x - velocity / STEPS


def log_probability(state, mean):
    """Of a normal distribution, without its constant."""
    return -((state - mean) ** 2).sum() / (2 * SPREAD**2 / STEPS)


@torch.no_grad()
def rollout(transformer, arguments):
    """States of a run, and of each step the velocity and the log-probability of the next state."""
    noise = torch.Generator().manual_seed(0)
    states, velocities, found = [arguments["hidden_states"]], [], []
    for step in range(STEPS):
        velocities.append(velocity(transformer, arguments, states[-1], step))
        mean = moved(states[-1], velocities[-1])
        states.append(mean + SPREAD / STEPS**0.5 * torch.randn(mean.shape, generator=noise))
        found.append(log_probability(states[-1], mean))
    return states, velocities, torch.stack(found)


def trained(transformer, arguments, states):
    """Log-probabilities of the same states, with gradients."""
    with warnings.catch_warnings(action="ignore"):
        means = [moved(state, velocity(transformer, arguments, state, step)) for step, state in enumerate(states[:-1])]
    return torch.stack([log_probability(state, mean) for state, mean in zip(states[1:], means, strict=True)])


@pytest.fixture
def model():
    """A tiny transformer and the arguments of one of its calls."""
    pipe = tiny_pipeline("flux")
    return pipe.transformer, recorded_calls(pipe, "flux")[0]


def test_exact_keeps_the_densities(model):
    """The trainer's log-probabilities are those of the rollout, and their gradients those of the plain transformer."""
    transformer, arguments = model
    _, _, plain = rollout(transformer, arguments)
    accelerate_transformer(transformer, "exact", TIMES)
    states, _, sampled = rollout(transformer, arguments)
    again = trained(transformer, arguments, states)
    assert torch.equal(sampled, plain) and torch.equal(again.detach(), sampled)
    again.sum().backward()
    assert all(item.grad is not None for item in transformer.transformer_blocks.parameters())


@torch.no_grad()
def test_densities_change_in_forecast_steps_alone(model):
    """There the velocity errs by less than the next computed step measures for a forecast from further away."""
    transformer, arguments = model
    acceleration = accelerate_transformer(transformer, "balanced", TIMES, warmup=3)
    states, velocities, _ = rollout(transformer, arguments)
    report = acceleration.report()
    acceleration.restore()
    measured = [step.error for step in report.steps]
    assert 0 < report.steps_by_mode["dispatch"] < STEPS
    for step, output in enumerate(velocities):
        plain = velocity(transformer, arguments, states[step], step)
        if report.steps[step].mode == "dispatch":
            error = (output - plain).norm() / plain.norm()
            assert 0 < error < next(item for item in measured[step:] if item is not None)
        else:
            assert torch.equal(output, plain)
