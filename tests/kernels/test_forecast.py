"""A weighted sum is rounded once, for features in any layout."""

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


def test_nothing_to_sum(backend, make_tensor):
    assert weighted_sum([make_tensor(2, 0, 8)], [1.0], backend=backend).shape == (2, 0, 8)


@pytest.mark.parametrize("view", [lambda x: x[:, 3:40, 8:24], lambda x: x.transpose(1, 2), lambda x: x[..., ::2]])
def test_views_of_any_kind(view, backend, make_tensor):
    """Entries may be parts of wider tensors, and one stacked tensor."""
    history = view(make_tensor(2, 48, 48)), view(make_tensor(2, 48, 48))
    expected = 2 * history[0] - history[1]
    for entries in (history, torch.stack(history)):
        torch.testing.assert_close(weighted_sum(entries, [2.0, -1.0], backend=backend), expected)
