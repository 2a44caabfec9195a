"""Linear layers in 8 bits: rows with scales, fused GELU and a second input, and the product."""

import pytest
import torch
import torch.nn.functional as F

from dit_accel.kernels import add_gated_norm_modulate, quantize_rows, quantized_linear, swiglu
from dit_accel.kernels.blocks.quantized_linear import LINEAR_DTYPES, empty_rows, turn
from tests.kernels.conftest import BACKENDS
from tests.pairs import every_pair

MOST = {"int8": 0.012, "float8": 0.045}  # relative error of a row


def dequantized(values, scales):
    """Reconstruct the rows, up to rounding, by rotating back."""
    rows = values.float() * scales[..., None]
    return turn(rows) if values.dtype == torch.int8 else rows


# The interpreter's conversion to e4m3 halves values whose rounding carries.
@pytest.mark.parametrize(("backend", "dtype"), [("reference", "int8"), ("reference", "float8"), ("triton", "int8")])
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("widths", [(96, 0), (64, 128), (0, 64)], ids=["x", "x-and-hidden", "hidden"])
def test_rows_come_back_within_a_step(backend, dtype, widths, gated, make_tensor):
    x, (hidden, value) = make_tensor(2, 5, widths[0]), make_tensor(2, 5, 2 * widths[1]).chunk(2, dim=-1)
    rows = torch.cat([x, swiglu(hidden, value) if gated else F.gelu(hidden, approximate="tanh")], dim=-1)
    values, scales = quantize_rows(x, hidden, value if gated else None, dtype=dtype, backend=backend)
    assert values.dtype == LINEAR_DTYPES[dtype] and (values.shape, scales.shape) == (rows.shape, rows.shape[:-1])
    assert ((dequantized(values, scales) - rows).norm(dim=-1) / rows.norm(dim=-1) < MOST[dtype]).all()


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_a_norm_quantises_its_result(rms, backend, make_tensor):
    """Bit for bit as quantising its output does."""
    x, update, scale, shift = (make_tensor(2, 5, 48) for _ in range(4))
    options, quantized = {"rms": rms, "backend": backend}, empty_rows(x, 48, "int8")
    _, normed = add_gated_norm_modulate(x, update, None, scale, shift, quantized=quantized, **options)
    assert all(map(torch.equal, quantized, quantize_rows(normed, dtype="int8", backend=backend)))


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


def test_turning_copies_nothing_from_the_host_again(monkeypatch):
    """Each copy would wait for the GPU, and no graph could hold it."""
    x = torch.randn(3, 16)
    turned = turn(x)
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(turn(x), turned)
