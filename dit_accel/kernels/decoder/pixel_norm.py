"""RMS normalisation of video features and SiLU, written into the padded input of a convolution.

    y = SiLU((x + c) / sqrt(mean((x + c)^2) + eps) * weight * (1 + scale) + shift)          out = pad(y)

The mean is that of a pixel's C channels. ``c`` is the bias of the previous convolution. A convolution over time reads
copies of the first frame before it, and of the last frame behind it. Pixels of a border repeat or reflect the outermost
ones, as in ``torch.nn.functional.pad`` with mode "replicate" or "reflect". A causal convolution (:func:`causal_norm`)
reads two frames that earlier calls kept, or zeros, and its border is zeros. The norm writes straight into the padded
tensor, so nothing is concatenated or copied.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op
from dit_accel.kernels.decoder.group_norm import empty

LAST = torch.channels_last_3d
SMALLEST = 1e-24  # sum of squares that is divided by, as in torch.nn.functional.normalize; keeps pixels of zeros zero


@eager_op
def pixel_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    eps: float = 0.0,
    before: int = 0,
    after: int = 0,
    border: int = 0,
    reflect: bool = False,
    silu: bool = True,
    input_bias: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Normalise each pixel, in float32 and rounded once, and pad. Forward only: no gradient flows.

    Args:
        x: ``[B, C, T, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        weight: ``[C]``, any float dtype; None = ones.
        shift, scale: ``[B, C]``, any float dtype; both or neither.
        before, after: number of copies of the first frame before it, and of the last frame after it.
        border: number of pixels at each border; with reflect less than H and W.
        reflect: the border reflects pixels without repeating the outermost ones; False = it repeats those.
        input_bias: ``[C]``, added to x before; None = nothing.

    Returns:
        ``[B, C, before + T + after, H + 2 border, W + 2 border]`` like x, in channels-last layout.
    """
    _require_video(x, before, after, border, reflect)
    batch, channels = x.shape[:2]
    if (shift is None) != (scale is None):
        raise ShapeError("shift and scale must be given together, got one; pass zeros for the other")
    checks.require_typed("x", x, (channels,), weight=weight, input_bias=input_bias)
    checks.require_typed("x", x, (batch, channels), shift=shift, scale=scale)
    out = _padded(x, before, after, border)
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.pixel_norm import pixel_norm_into

        vectors = tuple(y if y is None else y.contiguous() for y in (weight, shift, scale, input_bias))
        pixel_norm_into(x.contiguous(memory_format=LAST), vectors, eps, before, border, reflect, silu, out)
        return out
    values = x.float() if input_bias is None else x.float() + input_bias.float()[:, None, None, None]
    squares = values.square().sum(1, keepdim=True).clamp(min=SMALLEST)
    y = values * torch.rsqrt(squares / channels + eps)
    if weight is not None:
        y = y * weight.float()[:, None, None, None]
    if shift is not None:
        shift, scale = (y.float()[:, :, None, None, None] for y in (shift, scale))
        y = y * (1 + scale) + shift
    _pad_into(out, F.silu(y) if silu else y, before, border, reflect)
    return out


@eager_op
def causal_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    past: torch.Tensor | None = None,
    *,
    frames: int = 2,
    border: int = 0,
    input_bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each pixel and apply SiLU, in float32 and rounded once, behind frames of the past.

    Forward only: no gradient flows.

    Args:
        x: ``[B, C, T, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        weight: ``[C]``, any float dtype.
        past: ``[B, C, P, H, W]`` like the result, P up to ``frames``: earlier, normalised; missing ones are 0.
        frames: number of frames before the first one.
        border: zeros on each side of rows and columns.
        input_bias: ``[C]``, added to x before; None = nothing.
        dtype: of the result; None = x's.

    Returns:
        ``[B, C, frames + T, H + 2 border, W + 2 border]`` in channels-last layout, and a copy of its last two frames
        without their border, the past of the next call.
    """
    _require_video(x, frames, 0, border, False)
    batch, channels, time, height, width = x.shape
    checks.require_typed("x", x, (channels,), weight=weight, input_bias=input_bias)
    dtype = dtype or x.dtype
    checks.require_typed("x", x, (batch, channels, "P", height, width), dtype, past=past)
    if past is not None and past.shape[2] > frames:
        raise ShapeError(f"past must have at most {frames} frames, got {past.shape[2]}")
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.pixel_norm import causal_norm_into

        out = _padded(x, frames, 0, border, dtype)
        kept = empty(x, (batch, channels, min(2, frames + time), height, width), dtype)
        x, past = (y if y is None else y.contiguous(memory_format=LAST) for y in (x, past))
        vectors = (y if y is None else y.contiguous() for y in (weight, input_bias))
        causal_norm_into(x, *vectors, past, out, kept, border)
        return out, kept
    values = x.float() if input_bias is None else x.float() + input_bias.float()[:, None, None, None]
    normed = F.normalize(values, dim=1) * channels**0.5 * weight.float()[:, None, None, None]
    padded = F.silu(normed).to(dtype)
    padded = padded if past is None else torch.cat([past, padded], 2)
    padded = F.pad(padded, (0, 0, 0, 0, frames + time - padded.shape[2], 0))
    out = F.pad(padded, (border, border, border, border, 0, 0)).contiguous(memory_format=LAST)
    return out, padded[:, :, -2:].clone(memory_format=LAST)


def pad_video(
    x: torch.Tensor, *, before: int = 0, after: int = 0, border: int = 0, reflect: bool = False
) -> torch.Tensor:
    """Repeat frames at both ends, and pixels at the borders, as in :func:`pixel_norm`; in channels-last layout.

    Args:
        x: ``[B, C, T, H, W]``, float16, bfloat16 or float32.
    """
    _require_video(x, before, after, border, reflect)
    out = _padded(x, before, after, border)
    _pad_into(out, x, before, border, reflect)
    return out


def _padded(x: torch.Tensor, before: int, after: int, border: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    batch, channels, time, height, width = x.shape
    return empty(x, (batch, channels, before + time + after, height + 2 * border, width + 2 * border), dtype)


def _pad_into(out: torch.Tensor, x: torch.Tensor, before: int, border: int, reflect: bool) -> None:
    time, height, width = x.shape[2:]
    frames = out[:, :, before : before + time]
    frames[..., border : border + height, border : border + width] = x
    for dim in (3, 4):
        for step in range(border):
            source = border + (border - step if reflect else 0)  # from the edge of out
            frames.select(dim, step).copy_(frames.select(dim, source))
            frames.select(dim, -1 - step).copy_(frames.select(dim, -1 - source))
    out[:, :, :before] = frames[:, :, :1]
    out[:, :, before + time :] = frames[:, :, -1:]


def _require_video(x: torch.Tensor, before: int, after: int, border: int, reflect: bool) -> None:
    checks.require_floats("x", x, ("B", "C", "T", "H", "W"), strided=True)
    if min(before, after, border) < 0:
        raise ShapeError(f"before, after and border must be at least 0, got {before}, {after} and {border}")
    if reflect and border >= min(x.shape[3:]):
        raise ShapeError(f"border must be less than the height and width of x, {list(x.shape[3:])}, got {border}")
