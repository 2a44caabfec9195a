"""Forecasts of other methods follow their formulas, their schedules compute the right steps, and nothing stays."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from dit_accel.tools.measure.compare import forecasters
from dit_accel.tools.measure.compare.forecasters import Plan, Record, every, forecasting, widening
from dit_accel.tools.measure.compare.mean_velocity import average_velocities, velocity_costs, velocity_weights
from dit_accel.tools.measure.compare.methods import Subject
from dit_accel.tools.measure.compare.snapshot import Snapshot
from tests.tiny import tiny_output, tiny_pipeline

FORMULAS = (
    *(partial(forecasters.spectrum, steps=50, blend=0.5), partial(forecasters.hicache, order=2, scale=0.7)),
    *(forecasters.foca, forecasters.dmd),
)


def records(at, values):
    """Computed records of ``values(step)`` at some steps."""
    return [Record(step, values(step), True) for step in at]


def noise(step):
    """Two samples of five values, in float64 others at each step."""
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def line(step):
    return 3.0 + 0.25 * step * torch.ones(2, 3)


@pytest.mark.parametrize("blend", [0.5, 1.0])
def test_spectrum_is_ridge_regression_on_chebyshev_polynomials(blend):
    """Against coefficients that are solved for, with polynomials as cosines, in float64; forecasts are not recorded."""
    at = [0, 1, 2, 3, 4, 6, 9]
    known = [*records(at, noise), Record(10, noise(10), False)]
    basis = [[math.cos(m * math.acos(step / 25 - 1)) for m in range(5)] for step in [*at, 12]]
    design = torch.tensor(basis, dtype=torch.float64)
    outputs = torch.stack([noise(step) for step in at]).flatten(1)
    fitted = torch.linalg.inv(design[:-1].T @ design[:-1] + 0.1 * torch.eye(5)) @ design[:-1].T @ outputs
    straight = outputs[-1] + 3 / 3 * (outputs[-1] - outputs[-2])
    expected = (blend * design[-1] @ fitted + (1 - blend) * straight).view(2, 5)
    torch.testing.assert_close(forecasters.spectrum(known, 12, steps=50, blend=blend), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.5, 0.7])
def test_hicache_is_taylorseer_in_scaled_hermite_polynomials(scale):
    """H₁ = 2x and H₂ = 4x² − 2 on finite differences over uneven distances."""
    (a, b, c), k = (noise(step) for step in (2, 4, 8)), 3
    first = (c - b) / 4
    second = (first - (b - a) / 2) / 4
    x = scale * k
    expected = c + first * scale * 2 * x + second / 2 * scale**2 * (4 * x**2 - 2)
    forecast = forecasters.hicache(records([2, 4, 8], noise), 8 + k, order=2, scale=scale)
    torch.testing.assert_close(forecast, expected, rtol=1e-5, atol=1e-5)


def test_foca_forecasts_with_bdf2_and_calibrates_with_heun():
    """Its own forecasts are among the values for the next forecast."""
    known = records([0, 4], noise)
    known.append(Record(5, noise(5), False))
    slope = (noise(4) - noise(0)) / 4
    bdf2 = 4 / 3 * noise(5) - 1 / 3 * noise(4) + 2 / 3 * slope
    expected = noise(5) + (slope + (bdf2 - noise(5))) / 2
    torch.testing.assert_close(forecasters.foca(known, 6), expected, rtol=1e-5, atol=1e-5)
    steady = [*records([0, 1, 2], line), Record(3, line(3), False)]
    for step in range(4, 8):
        steady.append(Record(step, forecasters.foca(steady, step), False))
    torch.testing.assert_close(steady[-1].output, line(7))


def test_dmd_is_the_decomposition_by_singular_values():
    """Against SVD and eigenvectors of the records themselves, in float64, of the newest six of seven."""
    at = range(4, 18, 2)
    forecast = forecasters.dmd(records(at, noise), 19)
    for sample in range(2):
        states = torch.stack([noise(step)[sample] for step in at][-6:], 1)
        left, values, right = torch.linalg.svd(states[:, :-1], full_matrices=False)
        operator = left.T @ states[:, 1:] @ right.T / values
        factors, vectors = torch.linalg.eig(operator)
        modes = (states[:, 1:] @ right.T / values).to(vectors.dtype) @ vectors
        start = torch.linalg.lstsq(modes, states[:, -1:].to(modes.dtype)).solution[:, 0]
        expected = (modes @ (factors**1.5 * start)).real
        torch.testing.assert_close(forecast[sample], expected, rtol=1e-3, atol=1e-3)


def test_dmd_is_a_line_where_records_are_few():
    """The line goes through the last two of fewer than four records at even distances; a single one is repeated."""
    for at in ([0], [0, 1], [0, 1, 2, 5], [0, 2, 3, 4]):
        expected = line(at[-1] + 2) if len(at) > 1 else line(at[-1])
        torch.testing.assert_close(forecasters.dmd(records(at, line), at[-1] + 2), expected)


def test_forecasts_have_the_outputs_shape_and_dtype():
    """Forecasts need one record; zeros stay zeros."""
    for formula, count in itertools.product(FORMULAS, (1, 2, 6)):
        forecast = formula(records(range(count), lambda step: torch.zeros(2, 4, 3, dtype=torch.bfloat16)), count)
        assert forecast.shape == (2, 4, 3) and forecast.dtype is torch.bfloat16 and not forecast.any()


def test_a_mean_velocity_is_read_off_a_window():
    """``v + (σ_s − σ_t) (u − v_r) / Δσ``, and the velocity itself where the window is one step."""
    falls = np.array([-1.0, -2.0, -3.0, -4.0])  # three of the window; the last of these begins the interval of two
    v = np.array([1.0, 5.0, 2.0])
    jvp = ((v * falls[:3]).sum() / -6 - v[0]) / -6
    assert velocity_weights(falls, 3) @ v == pytest.approx(v[-1] + -7 * jvp)
    assert velocity_weights(falls[2:], 1).tolist() == [1.0]


@pytest.mark.parametrize("whole", [False, True], ids=["skipped", "whole"])
def test_meancache_takes_the_cheapest_path(whole):
    """The path is the best of all with this number of steps; a constant velocity costs nothing."""
    sigmas = torch.linspace(1, 0, 8).square().tolist()
    costs = velocity_costs([[noise(step) for step in range(7)], [noise(step + 9) for step in range(7)]], sigmas, whole)
    computed, weights = average_velocities(costs, 3, whole)
    paths = [[0, *others, 7] for others in itertools.combinations(range(1, 7), 2)]
    dearest = [sum(costs[edge][0] ** 4 for edge in itertools.pairwise(path)) for path in paths]
    assert [*computed, 7] == paths[int(np.argmin(dearest))]
    assert weights.keys() - set(computed) == set(range(7)) - set(computed)
    assert bool(weights.keys() & computed) == whole
    steady = velocity_costs([[torch.ones(2, 3)] * 7], sigmas, whole)
    assert max(cost for cost, _ in steady.values()) < 1e-6


def test_schedules():
    """Spectrum's published settings take 14 and 10 of 50 steps; an interval counts from the warm-up."""
    assert widening(2, 0.75, 50) == {0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 25, 31, 38, 46}
    assert len(widening(2, 3.0, 50)) == 10 and widening(2, 0.75, 3) == {0, 1, 2}
    assert every(4, 3, 12) == {0, 1, 2, 6, 10, 11} and every(3, 8, 4) == {0, 1, 2, 3}


def computed_steps(pipe, name, steps):
    """Steps in which the transformer's blocks run, once for each branch."""
    ran = []
    block = next(module for key, module in pipe.transformer.named_modules() if key.endswith("blocks.0"))
    handle = block.register_forward_hook(lambda *_: ran.append(pipe.scheduler.step_index or 0))
    try:
        tiny_output(pipe, name, steps=steps)
    finally:
        handle.remove()
    return ran


def test_branches_are_forecast_from_their_own_records():
    """Two branches run one after the other; a repeated output is the same branch's last one.

    The next run computes the same steps, and without the plan all are computed, with nothing left behind.
    """
    pipe, outputs = tiny_pipeline("wan"), []
    plain = tiny_output(pipe, "wan", steps=4)
    snapshot = Snapshot(pipe)
    with forecasting(pipe, Plan({0, 2}, lambda known, step: known[-1].output)) as (hook,):
        handle = pipe.transformer.register_forward_hook(lambda module, args, output: outputs.append(output[0].clone()))
        tiny_output(pipe, "wan", steps=4)
        handle.remove()
        assert computed_steps(pipe, "wan", steps=4) == [0, 0, 2, 2]
        assert [len(trail) for trail in hook.trails.values()] == [4, 4], "of this run alone"
    assert snapshot.restore() == {} and torch.equal(tiny_output(pipe, "wan", steps=4), plain)
    first, second = outputs[::2], outputs[1::2]
    assert torch.equal(first[1], first[0]) and torch.equal(second[3], second[2])
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[2], first[1])


@pytest.mark.parametrize("moves", forecasters.MOVES)
def test_meancache_learns_from_the_tuning_run(moves):
    """One tuning run serves all settings; with all steps the result is the plain image."""
    pipe = tiny_pipeline("wan")
    plain, runs = tiny_output(pipe, "wan", steps=6), []
    subject = Subject(pipe, 6, 2, lambda: runs.append(tiny_output(pipe, "wan", steps=6, prompt="snow")))
    with forecasting(pipe, forecasters._plan_meancache(subject, 1.0, moves)):
        assert torch.equal(tiny_output(pipe, "wan", steps=6), plain)
    plan = forecasters._plan_meancache(subject, 0.5, moves)
    with forecasting(pipe, plan):
        assert computed_steps(pipe, "wan", 6) == sorted([*plan.computed] * 2)
    assert len(plan.computed) == 3 and len(runs) == 1
