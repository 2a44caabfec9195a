"""A weighted sum rounds once, and with a plan it writes the rows that are reused and no others."""

import math

import pytest
import torch

from dit_accel.errors import BackendError, UnsupportedError
from dit_accel.kernels import weighted_sum
from tests.kernels.conftest import IMPLEMENTED, is_refused
from tests.pairs import every_pair

WEIGHTS = {1: [1.0], 2: [1.5, -0.5], 3: [3.0, -3.0, 1.0]}


def exact_sum(history, weights):
    return sum(weight * features.double() for weight, features in zip(weights, history, strict=True))


def assert_rounded_once(actual, exact, history, weights):
    """Within half a unit of the result's dtype, and float32 rounding of the terms."""
    terms = exact_sum([features.abs() for features in history], [abs(weight) for weight in weights])
    allowed = 0.5 * torch.finfo(actual.dtype).eps * exact.abs() * 1.01 + 4 * torch.finfo(torch.float32).eps * terms
    assert ((actual.double() - exact).abs() <= allowed + 1e-7).all()


@every_pair(is_refused, weights=WEIGHTS.values(), **IMPLEMENTED)
def test_sum_is_rounded_once(weights, backend, dtype, make_tensor):
    history = [make_tensor(2, 37, 129, dtype=dtype) for _ in weights]
    actual = weighted_sum(history, weights, backend=backend)
    assert (actual.shape, actual.dtype) == (history[0].shape, dtype)
    assert_rounded_once(actual, exact_sum(history, weights), history, weights)


def test_float64_is_summed_in_float64(make_tensor):
    """The reference sums in float64, and `auto` chooses it; the kernel, requested by name, refuses."""
    history = [make_tensor(2, 37, 129).double() for _ in range(3)]
    actual, exact = weighted_sum(history, WEIGHTS[3]), exact_sum(history, WEIGHTS[3])
    assert actual.dtype == torch.float64 and float((actual - exact).abs().max()) < 1e-14
    with pytest.raises((UnsupportedError, BackendError), match=r"float64|can't run here"):
        weighted_sum(history, WEIGHTS[3], backend="triton")


@every_pair(is_refused, case=((2, 3, 200, 64), (1, 5, 40, 64), (1, 2, 260, 128)), **IMPLEMENTED)
def test_a_plan_limits_it_to_reused_rows(case, backend, dtype, make_tensor, make_sparsity):
    batch, heads, tokens, block = case
    sparsity = make_sparsity(batch, heads, tokens, block)
    history = [make_tensor(batch, tokens, heads, 24, dtype=dtype) for _ in range(2)]
    out = torch.full_like(history[0], math.nan)
    assert weighted_sum(history, [1.5, -0.5], plan=sparsity.plan, out=out, backend=backend) is out
    computed = sparsity.tokens_computed()
    assert torch.equal(out.isnan().any(-1), computed)
    assert torch.equal(out.isnan().all(-1), computed)
    reused = [features[~computed] for features in history]
    assert_rounded_once(out[~computed], exact_sum(reused, [1.5, -0.5]), reused, [1.5, -0.5])


@pytest.mark.parametrize("planned", [False, True], ids=["everything", "plan"])
def test_strided_inputs_and_outputs(planned, backend, make_tensor, make_sparsity):
    plan = make_sparsity(1, 3, 130, rows=0.0).plan if planned else None
    history = make_tensor(2, 1, 130, 2, 3, 16)[:, :, :, 0]
    out = torch.zeros(1, 130, 6, 16, device=history.device)[:, :, ::2]
    weighted_sum(history, [2.0, -1.0], plan=plan, out=out, backend=backend)
    torch.testing.assert_close(out, 2 * history[0] - history[1])


STRIDED = {
    "rows": lambda x: x[:, 3:40, 8:24],
    "uneven-rows": lambda x: x[:, 3:40],
    "transposed": lambda x: x.transpose(1, 2),
    "steps": lambda x: x[..., ::2],
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_views_of_any_kind(view, backend, make_tensor):
    """Memory around a view stays unchanged, whether its rows have a single stride or not."""
    strided = view(make_tensor(2, 48, 48))
    history = [strided, make_tensor(*strided.shape)]
    whole = torch.full((2, 48, 48), math.nan, device=strided.device)
    weighted_sum(history, [2.0, -1.0], out=view(whole), backend=backend)
    torch.testing.assert_close(view(whole), 2 * history[0] - history[1])
    assert whole.isnan().sum() == whole.numel() - strided.numel()


def test_nothing_to_sum(backend, make_tensor):
    assert weighted_sum([make_tensor(2, 0, 8)], [1.0], backend=backend).shape == (2, 0, 8)


def test_the_output_may_be_a_history_entry(backend, make_tensor):
    history = [make_tensor(5, 7), make_tensor(5, 7)]
    expected = 2 * history[0] - history[1]
    torch.testing.assert_close(weighted_sum(history, [2.0, -1.0], out=history[0], backend=backend), expected)
