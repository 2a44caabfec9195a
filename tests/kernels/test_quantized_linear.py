"""Linear layers in 8 bits: rows with scales, fused GELU and a second input, and the product."""

import pytest
import torch
import torch.nn.functional as F

from dit_accel.kernels import quantize_rows, quantized_linear
from dit_accel.kernels.blocks.quantized_linear import LINEAR_DTYPES, turn
from tests.kernels.conftest import BACKENDS
from tests.pairs import every_pair

MOST = {"int8": 0.012, "float8": 0.045}  # relative error of a row


def dequantized(values, scales):
    """Reconstruct the rows, up to rounding, by rotating back."""
    rows = values.float() * scales[..., None]
    return turn(rows) if values.dtype == torch.int8 else rows


# The interpreter's conversion to e4m3 halves values whose rounding carries.
@pytest.mark.parametrize(("backend", "dtype"), [("reference", "int8"), ("reference", "float8"), ("triton", "int8")])
@pytest.mark.parametrize("widths", [(96, None), (64, 128), (0, 64)], ids=["x", "x-and-gelu", "gelu"])
def test_rows_come_back_within_a_step(backend, dtype, widths, make_tensor):
    width, gelu_width = widths
    x = make_tensor(2, 5, width)
    gelu = None if gelu_width is None else make_tensor(2, 5, gelu_width)
    rows = x if gelu is None else torch.cat([x, F.gelu(gelu, approximate="tanh")], dim=-1)
    values, scales = quantize_rows(x, gelu, dtype=dtype, backend=backend)
    assert values.dtype == LINEAR_DTYPES[dtype]
    assert values.shape == rows.shape
    assert scales.shape == rows.shape[:-1]
    error = (dequantized(values, scales) - rows).norm(dim=-1) / rows.norm(dim=-1)
    assert (error < MOST[dtype]).all()


def test_rows_that_lie_apart(backend, make_tensor):
    """Rows of zeros among them stay zeros."""
    x = make_tensor(4, 6, 64)[:, 1:, 16:48]
    x[2] = 0
    values, scales = quantize_rows(x, dtype="int8", backend=backend)
    expected = quantize_rows(x.contiguous(), dtype="int8", backend="reference")
    assert torch.allclose(scales, expected[1])
    assert (values.int() - expected[0].int()).abs().max() <= 1 and not values[2].any()


def test_turning_spreads_what_is_large():
    """A layer whose inputs have a feature of 30 times the size errs no more than others."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512), torch.randn(256, 512)
    x[:, 7] *= 30
    exact = F.linear(x, weight)
    rows, weights = quantize_rows(x, dtype="int8"), quantize_rows(weight, dtype="int8")
    error = quantized_linear(*rows, *weights, out_dtype="float32") - exact
    assert error.norm() / exact.norm() < 0.02


SHAPES = {"small": (2, 37, 64, 48), "ragged-tiles": (1, 130, 144, 144)}


@every_pair(shape=SHAPES, biased=(True, False), dtype=list(LINEAR_DTYPES), backend=BACKENDS)
def test_product_is_that_of_the_rounded(backend, dtype, biased, shape, make_tensor):
    batch, tokens, channels, columns = shape
    x, weight = make_tensor(batch, tokens, channels), make_tensor(columns, channels)
    bias = make_tensor(columns) if biased else None
    rows, weights = (quantize_rows(y, dtype=dtype, backend="reference") for y in (x, weight))
    exact = F.linear(dequantized(*rows).double(), dequantized(*weights).double())
    exact = exact if bias is None else exact + bias.double()
    product = quantized_linear(*rows, *weights, bias, out_dtype="float32", backend=backend)
    # Hopper's matrix units add float8 products with 14 bits.
    rounding = 2e-3 if dtype == "float8" and product.is_cuda else 1e-5
    assert (product.double() - exact).norm() < rounding * exact.norm()


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.02), ("float8", 0.06)])
def test_error_of_a_layer(dtype, most, make_tensor):
    x, weight = make_tensor(64, 512), make_tensor(256, 512)
    product = quantized_linear(*quantize_rows(x, dtype=dtype), *quantize_rows(weight, dtype=dtype), out_dtype="float32")
    exact = F.linear(x, weight)
    assert (product - exact).norm() / exact.norm() < most
