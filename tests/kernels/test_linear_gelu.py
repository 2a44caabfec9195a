"""A linear layer with GELU in its epilogue is no worse than the two one after the other."""

import pytest
import torch
import torch.nn.functional as F

from dit_accel.kernels import linear_gelu


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_product_and_activation(dtype, biased, make_tensor, assert_no_worse):
    x, weight = make_tensor(2, 24, 64, dtype=dtype), make_tensor(96, 64, dtype=dtype)
    bias = make_tensor(96, dtype=dtype) if biased else None
    exact = F.gelu(F.linear(x.double(), weight.double(), None if bias is None else bias.double()), approximate="tanh")
    low = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    assert_no_worse(linear_gelu(x, weight, bias), exact, low)
