"""An MLP's gate equals its formula in float64, rounded once; GELU in an epilogue is no worse than GELU behind it."""

import torch
import torch.nn.functional as F

from dit_accel.kernels import linear_gelu, swiglu
from tests.kernels.conftest import IMPLEMENTED, assert_no_worse, assert_rounded_once, is_refused
from tests.pairs import every_pair

PLACES = {  # of gate and value: halves of one tensor, whole or a part of a wider one, or two tensors
    "halves": lambda make, width: (make(2, 7, 2 * width), None),
    "part": lambda make, width: (make(2, 8, 2 * width + 50)[:, 1:, 40 : 40 + 2 * width], None),
    "apart": lambda make, width: (make(2, 7, width + 30)[..., 16 : 16 + width], make(2, 7, width)),
}


@every_pair(is_refused, place=PLACES, width=(48, 3000), **IMPLEMENTED)
def test_gate_times_value(place, width, backend, dtype, make_tensor):
    """Into a new tensor, and into some features of another one."""
    x, value = place(lambda *shape: make_tensor(*shape, dtype=dtype) * 3, width)
    halves = x.double().chunk(2, dim=-1) if value is None else (x.double(), value.double())
    exact, y = halves[0] * halves[0].sigmoid() * halves[1], swiglu(x, value, backend=backend)
    assert y.dtype == dtype
    assert_rounded_once(y, exact, exact.abs() + 0.02, torch.contiguous_format)  # half a unit of the smallest float16
    wide = torch.full((2, 7, width + 16), torch.nan, dtype=dtype, device=x.device)
    out = swiglu(x, value, out=wide[..., 10:-6], backend=backend)
    assert out.data_ptr() == wide[..., 10:].data_ptr() and torch.equal(out, y)
    assert wide[..., :10].isnan().all() and wide[..., -6:].isnan().all()


@every_pair(biased=(True, False), dtype=(torch.float32, torch.bfloat16))
def test_product_and_activation(dtype, biased, make_tensor):
    x, weight = make_tensor(2, 24, 64, dtype=dtype), make_tensor(96, 64, dtype=dtype)
    bias = make_tensor(96, dtype=dtype) if biased else None
    exact = F.gelu(F.linear(x.double(), weight.double(), None if bias is None else bias.double()), approximate="tanh")
    assert_no_worse(linear_gelu(x, weight, bias), exact, F.gelu(F.linear(x, weight, bias), approximate="tanh"))
