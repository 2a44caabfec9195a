"""RMS normalisation of video features behind frames of the past equals its formula in float64."""

import torch
import torch.nn.functional as F

from dit_accel.kernels import causal_norm
from tests.kernels.conftest import IMPLEMENTED, is_refused
from tests.pairs import every_pair

LAST = torch.channels_last_3d
SHAPES = {"odd": (2, 24, 3, 5, 7), "one-pixel": (1, 16, 1, 1, 1), "one-frame": (2, 12, 1, 6, 9)}


@every_pair(is_refused, shape=SHAPES, known=(None, 1, 2), has_bias=(True, False), **IMPLEMENTED)
def test_normalises_behind_the_past(shape, known, has_bias, backend, dtype, make_tensor):
    batch, channels, time, height, width = shape
    x, weight, bias = make_tensor(*shape, dtype=dtype), make_tensor(channels), make_tensor(channels)
    past = None if known is None else make_tensor(batch, channels, known, height, width, dtype=dtype)
    options = {"input_bias": bias if has_bias else None, "backend": backend}
    out, last = causal_norm(x.contiguous(memory_format=LAST), weight, past, **options)
    assert torch.equal(last, out[:, :, -2:]) and last.is_contiguous(memory_format=LAST)
    assert out.shape == (batch, channels, 2 + time, height, width) and out.is_contiguous(memory_format=LAST)
    kept = known or 0
    assert (out[:, :, : 2 - kept] == 0).all()
    assert past is None or torch.equal(out[:, :, 2 - kept : 2], past)
    values = x.double() + (bias.double()[:, None, None, None] if has_bias else 0.0)
    expected = F.silu(F.normalize(values, dim=1) * channels**0.5 * weight.double()[:, None, None, None])
    allowed = 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-5
    assert ((out[:, :, 2:].double() - expected).abs() <= allowed).all()


def test_a_norm_alone_may_stand_behind_no_frames(backend, make_tensor):
    x, weight = make_tensor(1, 8, 2, 3, 3), make_tensor(8)
    out, last = causal_norm(x, weight, frames=0, silu=False, backend=backend)
    assert torch.equal(last, out)
    expected = F.normalize(x.double(), dim=1) * 8**0.5 * weight.double()[:, None, None, None]
    assert (out.double() - expected).abs().max() < 1e-5


@every_pair(is_refused, **IMPLEMENTED)
def test_a_border_is_zeros(backend, dtype, make_tensor):
    x, weight, past = make_tensor(2, 8, 2, 3, 5, dtype=dtype), make_tensor(8), make_tensor(2, 8, 1, 3, 5, dtype=dtype)
    out, last = causal_norm(x, weight, past, border=1, backend=backend)
    assert torch.equal(last, out[:, :, -2:, 1:-1, 1:-1])
    assert torch.equal(out[..., 1:-1, 1:-1], causal_norm(x, weight, past, backend=backend)[0])
    assert (F.pad(out[..., 1:-1, 1:-1], (1, 1, 1, 1)) == out).all() and out.is_contiguous(memory_format=LAST)


def test_a_pixel_of_zeros_stays_zero(backend, make_tensor):
    out, _ = causal_norm(torch.zeros_like(make_tensor(1, 8, 1, 2, 2)), make_tensor(8), backend=backend)
    assert (out == 0).all()
