"""RMS normalisations of video features, padded or behind frames of the past, equal their formulas in float64."""

import pytest
import torch
import torch.nn.functional as F

from dit_accel.kernels import causal_norm, pad_video, pixel_norm
from tests.kernels.conftest import IMPLEMENTED, assert_rounded_once, is_refused
from tests.pairs import every_pair

LAST = torch.channels_last_3d
SHAPES = {"odd": (2, 24, 3, 5, 7), "one-pixel": (1, 16, 1, 1, 1), "one-frame": (2, 12, 1, 6, 9)}
PADDINGS = {
    "none": {},
    "causal": {"before": 2},
    "both-ends": {"before": 1, "after": 1},
    "border": {"before": 2, "border": 1},
    "wide-border": {"border": 2},
}
REFLECTED = {
    "reflected-both-ends": {"before": 1, "after": 1, "border": 1, "reflect": True},
    "reflected-wider": {"border": 2, "reflect": True},
}


def exact_pad(x, before=0, after=0, border=0, reflect=False):
    """By torch's own padding, one axis after the other."""
    x = torch.cat([x[:, :, :1]] * before + [x] + [x[:, :, -1:]] * after, 2)
    return F.pad(x, [border] * 4 + [0, 0], mode="reflect" if reflect else "replicate") if border else x


def exact_norm(x, weight=None, shift=None, scale=None, bias=None, eps=0.0):
    x = x.double() + (0.0 if bias is None else bias.double()[:, None, None, None])
    x = x / (x.square().mean(1, keepdim=True) + eps).sqrt()
    if weight is not None:
        x = x * weight.double()[:, None, None, None]
    if shift is not None:
        x = x * (1 + scale.double()[:, :, None, None, None]) + shift.double()[:, :, None, None, None]
    return x


def is_left_out(case):
    return is_refused(case) or (case["padding"].get("reflect") and case["shape"] == SHAPES["one-pixel"])


@every_pair(is_left_out, shape=SHAPES, padding=PADDINGS | REFLECTED, is_modulated=(True, False), **IMPLEMENTED)
def test_normalises_and_pads(shape, padding, is_modulated, backend, dtype, make_tensor):
    """With a bias of the input where it is modulated."""
    batch, channels = shape[:2]
    x = make_tensor(*shape, dtype=dtype)
    shift, scale = (make_tensor(batch, channels, dtype=dtype) if is_modulated else None for _ in range(2))
    bias = make_tensor(channels) if is_modulated else None
    options = {"eps": 1e-3, "input_bias": bias, "backend": backend, **padding}
    out = pixel_norm(x.contiguous(memory_format=LAST), None, shift, scale, **options)
    expected = F.silu(exact_pad(exact_norm(x, None, shift, scale, bias, 1e-3), **padding))
    assert out.dtype == dtype
    assert_rounded_once(out, expected, 2.6, LAST)


@every_pair(is_refused, shape=SHAPES, known=(None, 1, 2), border=(0, 1), has_bias=(True, False), **IMPLEMENTED)
def test_normalises_behind_the_past(shape, known, border, has_bias, backend, dtype, make_tensor):
    """Frames of the past or zeros come first, the border is zeros, and the last frames are the next call's past."""
    batch, channels, _, height, width = shape
    x, weight = make_tensor(*shape, dtype=dtype if has_bias else torch.float32), make_tensor(channels)
    bias = make_tensor(channels) if has_bias else None
    past = make_tensor(batch, channels, known or 0, height, width, dtype=dtype)
    options = {"border": border, "input_bias": bias, "dtype": dtype, "backend": backend}
    out, last = causal_norm(x.contiguous(memory_format=LAST), weight, past if known else None, **options)
    normed = F.silu(exact_norm(x, weight, bias=bias))
    before = F.pad(past.double(), (0, 0, 0, 0, 2 - past.shape[2], 0))
    expected = F.pad(torch.cat([before, normed], 2), [border] * 4 + [0, 0])
    assert_rounded_once(out, expected, 2.6, LAST)
    assert torch.equal(out[:, :, :2], expected[:, :, :2].to(dtype))
    assert torch.equal(last, out[:, :, -2:, border : border + height, border : border + width])
    assert last.is_contiguous(memory_format=LAST)


def test_a_norm_alone(backend, make_tensor):
    """Of features in any layout."""
    x, weight = make_tensor(1, 8, 2, 3, 3), make_tensor(8)
    causal, last = causal_norm(x, weight, frames=0, backend=backend)
    assert torch.equal(last, causal) and (causal.double() - F.silu(exact_norm(x, weight))).abs().max() < 1e-5
    assert (pixel_norm(x, weight, silu=False, backend=backend).double() - exact_norm(x, weight)).abs().max() < 1e-5


@pytest.mark.parametrize("size", [1e-10, 1e-13, 0.0], ids=["above-the-limit", "below-the-limit", "zero"])
def test_short_pixels_are_normalised_like_torch(size, backend, make_tensor):
    """Without eps, a norm below 1e-12 counts as 1e-12."""
    x = F.normalize(make_tensor(1, 8, 1, 2, 2), dim=1) * size
    exact = F.silu(F.normalize(x, dim=1) * 8**0.5)
    causal, _ = causal_norm(x, torch.ones(8, device=x.device), frames=0, backend=backend)
    for out in (causal, pixel_norm(x, backend=backend)):
        assert torch.allclose(out, exact, rtol=1e-5)


@pytest.mark.parametrize("padding", [*PADDINGS.values(), *REFLECTED.values()], ids=[*PADDINGS, *REFLECTED])
def test_pads_like_torch(padding, make_tensor):
    x = make_tensor(2, 3, 2, 5, 7)
    padded = pad_video(x, **padding)
    assert torch.equal(padded, exact_pad(x, **padding)) and padded.is_contiguous(memory_format=LAST)
