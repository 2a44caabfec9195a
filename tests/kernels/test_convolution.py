"""Convolutions equal their formulas in float64, also behind upsampling that is never computed."""

import pytest
import torch
import torch.nn.functional as F

from dit_accel.errors import UnsupportedError
from dit_accel.kernels import convolution, fold_upsampling, upsampled_convolution
from tests.kernels.conftest import IMPLEMENTED, is_refused
from tests.pairs import every_pair

LAST = torch.channels_last_3d
SHAPES = {  # of x, output channels, taps
    "video": ((1, 16, 4, 9, 18), 32, (3, 3, 3)),
    "two-products": ((2, 32, 3, 5, 7), 96, (3, 3, 3)),
    "image": ((1, 16, 1, 3, 20), 64, (1, 3, 3)),
    "one-tap": ((1, 48, 2, 1, 1), 192, (1, 1, 1)),
    "colours": ((2, 16, 3, 2, 5), 3, (3, 3, 3)),
}
VIDEOS = ((2, 16, 3, 5, 9), (1, 16, 1, 2, 17))


def assert_close(actual, expected, dtype, work):
    assert actual.dtype == dtype and actual.is_contiguous(memory_format=LAST)
    eps = max(torch.finfo(dtype).eps, 2**-10 if actual.is_cuda else 0)  # products are TF32 on a GPU
    allowed = 2.2 * eps * (expected.abs() + work**0.5)
    assert ((actual.double() - expected).abs() <= allowed + 2e-4).all()


@every_pair(is_refused, case=SHAPES, adds=(True, False), **IMPLEMENTED)
def test_convolves(case, adds, backend, dtype, make_tensor):
    shape, outputs, taps = case
    shape = (*shape[:3], *(side + tap - 1 for side, tap in zip(shape[3:], taps[1:], strict=True)))
    x, weight = make_tensor(*shape, dtype=dtype), make_tensor(outputs, shape[1], *taps, dtype=dtype)
    expected = F.conv3d(x.double(), weight.double())
    bias = residual = None
    if adds:
        bias, residual = make_tensor(outputs), make_tensor(*expected.shape)
        expected = expected + bias.double()[:, None, None, None] + residual.double()
    result = torch.float32 if adds else dtype
    out = convolution(x, weight, bias, residual, dtype=result, backend=backend)
    assert_close(out, expected, result, shape[1] * weight[0, 0].numel())


@every_pair(is_refused, frames=(False, True), mode=("constant", "replicate"), shape=VIDEOS, **IMPLEMENTED)
def test_convolves_what_would_be_upsampled(frames, mode, shape, backend, dtype, make_tensor):
    """The first frame is not repeated, and the frame before it is a copy of it."""
    x, bias = make_tensor(*shape, dtype=dtype), make_tensor(32, dtype=dtype)
    weight = make_tensor(32, shape[1], 3 if frames else 1, 3, 3, dtype=dtype)
    large = x.double().repeat_interleave(2, 3).repeat_interleave(2, 4)
    if frames:
        large = torch.cat([large[:, :, :1], large[:, :, 1:].repeat_interleave(2, 2)], 2)
    large = F.pad(large.float(), (1, 1, 1, 1, 0, 0), mode=mode)
    large = F.pad(large, (0, 0, 0, 0, 2 if frames else 0, 0), mode="replicate").double()
    expected = F.conv3d(large, weight.double(), bias.double())
    x = F.pad(x.float(), (1, 1, 1, 1, 0, 0), mode=mode).to(dtype)
    x = torch.cat([x[:, :, :1], x], 2) if frames else x
    out = upsampled_convolution(x, fold_upsampling(weight, frames=frames), bias, backend=backend)
    assert_close(out, expected, dtype, shape[1] * weight[0, 0].numel())


def test_the_kernel_names_the_channels_it_needs(make_tensor):
    with pytest.raises(UnsupportedError, match="multiple of 16 channels, got 8"):
        convolution(make_tensor(1, 8, 1, 3, 3), make_tensor(32, 8, 1, 3, 3), backend="triton")
