"""A gated MLP's activation in one pass equals its formula in float64, rounded once."""

import torch

from dit_accel.kernels import swiglu
from tests.kernels.conftest import IMPLEMENTED, assert_rounded_once, is_refused
from tests.pairs import every_pair


def check(actual, x):
    gate, value = x.double().chunk(2, dim=-1)
    exact = gate * gate.sigmoid() * value
    assert actual.dtype == x.dtype
    assert_rounded_once(actual, exact, exact.abs() + 0.02)  # half a unit of the smallest float16


@every_pair(is_refused, width=(48, 3000), **IMPLEMENTED)
def test_gate_times_value(width, backend, dtype, make_tensor):
    x = make_tensor(2, 7, 2 * width, dtype=dtype) * 3
    check(swiglu(x, backend=backend), x)


@every_pair(is_refused, **IMPLEMENTED)
def test_gate_and_value_may_lie_apart(backend, dtype, make_tensor):
    """The gate is part of a wider tensor, the value has a projection of its own."""
    wide, value = make_tensor(2, 7, 80, dtype=dtype), make_tensor(2, 7, 48, dtype=dtype)
    gate = wide[..., 16:64]
    y = swiglu(gate, value, backend=backend)
    assert y.is_contiguous() and torch.equal(y, swiglu(torch.cat([gate, value], dim=-1), backend=backend))


@every_pair(is_refused, **IMPLEMENTED)
def test_of_features_of_a_wide_tensor_into_features_of_another(backend, dtype, make_tensor):
    x = make_tensor(2, 7, 200, dtype=dtype)[:, 1:, 40:136]
    wide = torch.full((2, 6, 64), torch.nan, dtype=dtype, device=x.device)
    out = swiglu(x, out=wide[..., 10:58], backend=backend)
    assert out.data_ptr() == wide[..., 10:].data_ptr()
    check(wide[..., 10:58], x)
    assert wide[..., :10].isnan().all() and wide[..., 58:].isnan().all()
