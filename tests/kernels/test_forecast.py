"""A weighted sum is rounded once, for features in any layout."""

import pytest
import torch

from dit_accel.errors import BackendError, UnsupportedError
from dit_accel.kernels import weighted_sum
from tests.kernels.conftest import IMPLEMENTED, assert_rounded_once, is_refused
from tests.pairs import every_pair

WEIGHTS = {1: [1.0], 2: [1.5, -0.5], 3: [3.0, -3.0, 1.0]}


def exact_sum(history, weights):
    return sum(weight * features.double() for weight, features in zip(weights, history, strict=True))


@every_pair(is_refused, weights=WEIGHTS.values(), **IMPLEMENTED)
def test_sum_is_rounded_once(weights, backend, dtype, make_tensor):
    history = [make_tensor(2, 37, 129, dtype=dtype) for _ in weights]
    actual = weighted_sum(history, weights, backend=backend)
    assert actual.dtype == dtype
    terms = exact_sum([features.abs() for features in history], [abs(weight) for weight in weights])
    assert_rounded_once(actual, exact_sum(history, weights), terms / 8 + 0.03)


def test_float64_is_summed_in_float64(make_tensor):
    """The reference sums in float64, and `auto` chooses it; the kernel, requested by name, refuses."""
    history = [make_tensor(2, 37, 129).double() for _ in range(3)]
    actual, exact = weighted_sum(history, WEIGHTS[3]), exact_sum(history, WEIGHTS[3])
    assert actual.dtype == torch.float64 and float((actual - exact).abs().max()) < 1e-14
    with pytest.raises((UnsupportedError, BackendError), match=r"float64|can't run here"):
        weighted_sum(history, WEIGHTS[3], backend="triton")


VIEWS = [lambda x: x[:, 3:40, 8:24], lambda x: x.transpose(1, 2), lambda x: x[..., ::2], lambda x: x[:, :0]]


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_any_kind(view, backend, make_tensor):
    """Entries may be parts of wider tensors, one stacked tensor, and empty."""
    history = view(make_tensor(2, 48, 48)), view(make_tensor(2, 48, 48))
    expected = 2 * history[0] - history[1]
    for entries in (history, torch.stack(history)):
        torch.testing.assert_close(weighted_sum(entries, [2.0, -1.0], backend=backend), expected)
