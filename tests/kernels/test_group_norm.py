"""Group normalisation with SiLU, and the sum behind a residual block, equal their formulas in float64."""

import torch
import torch.nn.functional as F

from dit_accel.kernels import add_residual, group_moments, group_norm
from tests.kernels.conftest import IMPLEMENTED, assert_rounded_once, is_refused
from tests.pairs import every_pair

LAST = torch.channels_last
SHAPES = {"odd": (2, 24, 5, 7), "one-pixel": (1, 16, 1, 1), "chunks": (1, 64, 33, 65)}


def exact(x, weight, bias, groups, eps, silu, input_bias):
    values = x.double() if input_bias is None else x.double() + input_bias.double()[:, None, None]
    normed = F.group_norm(values, groups, weight.double(), bias.double(), eps)
    return F.silu(normed) if silu else normed


@every_pair(is_refused, shape=SHAPES, silu=(True, False), has_bias=(True, False), **IMPLEMENTED)
def test_normalises_groups(shape, silu, has_bias, backend, dtype, make_tensor):
    x, channels = make_tensor(*shape, dtype=dtype) * 3 + 1, shape[1]
    weight, bias, input_bias = (make_tensor(channels, dtype=dtype) for _ in range(3))
    options = {"groups": 8, "eps": 1e-6, "silu": silu, "input_bias": input_bias if has_bias else None}
    out = group_norm(x.contiguous(memory_format=LAST), weight, bias, **options, backend=backend)
    assert out.dtype == dtype
    assert_rounded_once(out, exact(x, weight, bias, *options.values()), 5, LAST)


@every_pair(is_refused, shape=SHAPES | {"video": (2, 8, 3, 5, 7)}, **IMPLEMENTED)
def test_moments_of_groups(shape, backend, dtype, make_tensor):
    """Of features behind a bias; a norm takes those of other features."""
    x, bias = make_tensor(*shape, dtype=dtype) * 3 + 1, make_tensor(shape[1], dtype=dtype)
    moments = group_moments(x, groups=4, input_bias=bias, backend=backend)
    values = (x.double().movedim(1, -1) + bias.double()).movedim(-1, 1).reshape(shape[0], 4, -1)
    assert moments.shape == (shape[0], 4, 2) and moments.dtype == torch.float32
    assert (moments[..., 0] - values.mean(-1)).abs().max() < 1e-4
    assert (moments[..., 1] - values.var(-1, correction=0)).abs().max() < 1e-3


def test_a_norm_takes_other_moments(backend, make_tensor):
    x, weight, bias = make_tensor(2, 8, 6, 5), make_tensor(8), make_tensor(8)
    options = {"groups": 4, "eps": 1e-6, "input_bias": bias, "backend": backend}
    moments = group_moments(x, groups=4, input_bias=bias, backend=backend)
    rows = [group_norm(part, weight, bias, moments=moments, **options) for part in x.split(4, 2)]
    assert (torch.cat(rows, 2) - group_norm(x, weight, bias, **options)).abs().max() < 1e-5


def test_a_mean_far_from_zero_costs_no_digits(backend, make_tensor):
    """The variance is a difference of large sums there."""
    x = make_tensor(1, 32, 48, 48) + 100
    weight, bias = torch.ones(32, device=x.device), torch.zeros(32, device=x.device)
    out = group_norm(x, weight, bias, groups=4, eps=1e-6, silu=False, backend=backend)
    assert (out.double() - exact(x, weight, bias, 4, 1e-6, False, None)).abs().max() < 2e-3


@every_pair(is_refused, shape=SHAPES, has_bias=(True, False), **IMPLEMENTED)
def test_adds_a_residual(shape, has_bias, backend, dtype, make_tensor):
    x, update, bias = make_tensor(*shape, dtype=dtype), make_tensor(*shape, dtype=dtype), make_tensor(shape[1])
    out = add_residual(x, update.contiguous(memory_format=LAST), bias if has_bias else None, backend=backend)
    expected = x.double() + update.double() + (bias.double()[:, None, None] if has_bias else 0.0)
    assert out.dtype == dtype
    assert_rounded_once(out, expected, 5, LAST)


PADDINGS = {
    "whole": {},
    "causal": {"before": 2, "border": 1},
    "later-frames": {"before": 2, "border": 1, "frames": slice(3, 5)},
    "first-frames": {"before": 1, "frames": slice(0, 2)},
}


@every_pair(is_refused, padding=PADDINGS, times=(None, 1, 2), **IMPLEMENTED)
def test_videos_get_a_border_of_repeated_pixels(padding, times, backend, dtype, make_tensor):
    """Moments are of all frames; frames before are the video's own, and a scale and a shift may count for blocks."""
    x, weight, bias = make_tensor(2, 16, 5, 4, 6, dtype=dtype), make_tensor(16), make_tensor(16)
    shape = (2, 16, 5, 4 // (times or 1), 6 // (times or 1))
    scale, shift = (None if times is None else make_tensor(*shape, dtype=dtype) for _ in range(2))
    out = group_norm(x, weight, bias, scale, shift, groups=4, eps=1e-6, **padding, backend=backend)
    whole = exact(x.flatten(2, 3), weight, bias, 4, 1e-6, False, None).unflatten(2, x.shape[2:4])
    if times is not None:
        of_pixels = (y.double().repeat_interleave(times, 3).repeat_interleave(times, 4) for y in (scale, shift))
        whole = whole * next(of_pixels) + next(of_pixels)
    whole = F.silu(whole)
    frames, before, border = padding.get("frames", slice(0, 5)), padding.get("before", 0), padding.get("border", 0)
    places = [max(frame, 0) for frame in range(frames.start - before, frames.stop)]
    expected = F.pad(whole[:, :, places], (border,) * 4 + (0, 0), mode="replicate")
    assert_rounded_once(out, expected, 5, torch.channels_last_3d)
