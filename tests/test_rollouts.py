"""Rollouts of reinforcement learning: samples of a stochastic sampler, whose log-probabilities follow the velocity."""

import torch

from dit_accel import accelerate_transformer
from tests.models.test_transformer import recorded_calls

STEPS = 12
TIMES = torch.linspace(1, 1 / STEPS, STEPS)
SPREAD = 0.3  # standard deviation of a step's noise, for a step of length 1


@torch.no_grad()
def test_densities_change_in_forecast_steps_alone(pipe):
    """There the velocity errs by less than the next computed step measures for a forecast from further away."""
    transformer, (arguments, *_) = pipe.transformer, recorded_calls(pipe, "flux")

    def velocity(x, step):
        changes = {"hidden_states": x, "timestep": TIMES[step].expand(len(x)), "return_dict": False}
        return transformer(**arguments | changes)[0]

    acceleration = accelerate_transformer(transformer, "balanced", TIMES, warmup=3)
    noise, states, velocities = torch.Generator().manual_seed(0), [arguments["hidden_states"]], []
    for step in range(STEPS):
        velocities.append(velocity(states[-1], step))
        mean = states[-1] - velocities[-1] / STEPS
        states.append(mean + SPREAD / STEPS**0.5 * torch.randn(mean.shape, generator=noise))
    report = acceleration.report()
    acceleration.restore()
    assert 0 < report.steps_by_mode["dispatch"] < STEPS
    for step, (record, output) in enumerate(zip(report.steps, velocities, strict=True)):
        plain = velocity(states[step], step)
        if record.mode == "dispatch":
            error = (output - plain).norm() / plain.norm()
            assert 0 < error < next(item.error for item in report.steps[step:] if item.error is not None)
        else:
            assert torch.equal(output, plain)
