"""RMS normalisation of video features into a padded tensor equals its formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import pad_video, pixel_norm

LAST = torch.channels_last_3d
SHAPES = {"odd": (2, 24, 3, 5, 7), "one-pixel": (1, 16, 1, 1, 1), "one-frame": (2, 12, 1, 6, 9)}
PADDINGS = {"none": {}, "causal": {"before": 2}, "both-ends": {"before": 1, "after": 1}}
REFLECTED = {"both-ends": {"before": 1, "after": 1, "border": 1}, "wider": {"border": 2}}


def exact_pad(x, before=0, after=0, border=0):
    """By torch's own padding, one axis after the other."""
    x = torch.cat([x[:, :, :1]] * before + [x] + [x[:, :, -1:]] * after, 2)
    return F.pad(x, [border] * 4 + [0, 0], mode="reflect") if border else x


def exact_norm(x, shift, scale, bias, eps):
    x = x.double() + (0.0 if bias is None else bias.double()[:, None, None, None])
    x = x / (x.square().mean(1, keepdim=True) + eps).sqrt()
    if shift is not None:
        x = x * (1 + scale.double()[:, :, None, None, None]) + shift.double()[:, :, None, None, None]
    return x


def cases():
    for name, shape in SHAPES.items():
        for padding in PADDINGS.items():
            yield pytest.param(shape, padding[1], id=f"{name}-{padding[0]}")
    for name, padding in REFLECTED.items():
        yield pytest.param(SHAPES["odd"], padding, id=f"odd-reflected-{name}")


@pytest.mark.parametrize(("shape", "padding"), list(cases()))
@pytest.mark.parametrize("is_modulated", [True, False], ids=["modulated", "plain"])
def test_normalises_and_pads(shape, padding, is_modulated, implementation, make_tensor):
    """With a bias of the input where it is modulated."""
    backend, dtype = implementation
    batch, channels = shape[:2]
    x = make_tensor(*shape, dtype=dtype)
    shift, scale = (make_tensor(batch, channels, dtype=dtype) if is_modulated else None for _ in range(2))
    bias = make_tensor(channels) if is_modulated else None
    given = {"eps": 1e-3, "input_bias": bias, "backend": backend, **padding}
    out = pixel_norm(x.contiguous(memory_format=LAST), shift, scale, **given)
    expected = F.silu(exact_pad(exact_norm(x, shift, scale, bias, 1e-3), **padding))
    assert out.shape == expected.shape and out.is_contiguous(memory_format=LAST)
    assert ((out.double() - expected).abs() <= 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-5).all()


def test_a_norm_alone(backend, make_tensor):
    """Of features in any layout, and of zeros."""
    x = make_tensor(1, 8, 2, 3, 3)
    out = pixel_norm(x, eps=1e-8, silu=False, backend=backend)
    assert (out.double() - exact_norm(x, None, None, None, 1e-8)).abs().max() < 1e-5
    assert (pixel_norm(torch.zeros_like(x), eps=1e-8, backend=backend) == 0).all()


@pytest.mark.parametrize("padding", [*PADDINGS.values(), *REFLECTED.values()], ids=[*PADDINGS, *REFLECTED])
def test_pads_like_torch(padding, make_tensor):
    x = make_tensor(2, 3, 2, 5, 7)
    padded = pad_video(x, **padding)
    assert torch.equal(padded, exact_pad(x, **padding)) and padded.is_contiguous(memory_format=LAST)


def test_errors_name_the_argument(make_tensor):
    x, vector = make_tensor(2, 6, 1, 2, 2), make_tensor(2, 6)
    with pytest.raises(ShapeError, match=r"scale must have shape \[2, 6\], got \[1, 6\]"):
        pixel_norm(x, vector, vector[:1], eps=1e-8)
    with pytest.raises(ShapeError, match="shift and scale must be given together"):
        pixel_norm(x, vector, eps=1e-8)
    with pytest.raises(ShapeError, match=r"input_bias must have shape \[6\], got \[2, 6\]"):
        pixel_norm(x, eps=1e-8, input_bias=vector)
    with pytest.raises(ShapeError, match=r"border must be less than the height and width of x, \[2, 2\], got 2"):
        pixel_norm(x, eps=1e-8, border=2)
    with pytest.raises(ShapeError, match="before and after must be numbers of frames, got -1 and 0"):
        pad_video(x, before=-1)
