"""RMS normalisation of video features with a shift and a scale by sample, and SiLU, padded for a convolution.

    y = SiLU((x + c) / sqrt(mean((x + c)^2) + eps) * (1 + scale) + shift)          out = pad(y)

The mean is that of a pixel's C channels. ``c`` is the bias of the previous convolution. Padding repeats the first and
the last frame, and reflects pixels at the borders without repeating the outermost ones, as
``torch.nn.functional.pad(mode="reflect")`` does. The norm writes straight into the padded tensor, so nothing is
concatenated or copied. In a compiled model results are contiguous instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import custom_op

LAST = torch.channels_last_3d


def _fake(x: torch.Tensor, before: int = 0, after: int = 0, border: int = 0, **_) -> torch.Tensor:
    batch, channels, time, height, width = x.shape
    return x.new_empty(batch, channels, before + time + after, height + 2 * border, width + 2 * border)


@custom_op(_fake)
def pixel_norm(
    x: torch.Tensor,
    shift: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    eps: float,
    before: int = 0,
    after: int = 0,
    border: int = 0,
    silu: bool = True,
    input_bias: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Normalise each pixel, in float32 and rounded once, and pad. Forward only: no gradient flows.

    Args:
        x: ``[B, C, T, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        shift, scale: ``[B, C]``, any float dtype; both or neither.
        eps: added to the mean of squares.
        before, after: number of copies of the first frame before it, and of the last frame after it.
        border: number of reflected pixels at each border, less than H and W.
        silu: apply SiLU to the result.
        input_bias: ``[C]``, added to x before; None = nothing.
        backend: "auto", "reference" or "triton".

    Returns:
        ``[B, C, before + T + after, H + 2 border, W + 2 border]`` like x, in channels-last layout.
    """
    _require_video(x, before, after, border)
    batch, channels = x.shape[:2]
    if (shift is None) != (scale is None):
        raise ShapeError("shift and scale must be given together, got one; pass zeros for the other")
    for name, vector, shape in (
        ("shift", shift, (batch, channels)),
        ("scale", scale, (batch, channels)),
        ("input_bias", input_bias, (channels,)),
    ):
        if vector is not None:
            checks.require_shape(name, vector, shape)
            checks.require_device(name, vector, "x", x)
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.pixel_norm import pixel_norm_into

        time, height, width = x.shape[2:]
        size = before + time + after, height + 2 * border, width + 2 * border
        out = x.new_empty(batch, *size, channels).permute(0, 4, 1, 2, 3)
        shift, scale = (each if each is None else each.contiguous() for each in (shift, scale))
        pixel_norm_into(x.contiguous(memory_format=LAST), shift, scale, eps, before, border, silu, input_bias, out)
        return out
    values = x.float() if input_bias is None else x.float() + input_bias.float()[:, None, None, None]
    normed = values * torch.rsqrt(values.square().mean(1, keepdim=True) + eps)
    if shift is not None:
        shift, scale = (each.float()[:, :, None, None, None] for each in (shift, scale))
        normed = normed * (1 + scale) + shift
    return pad_video((F.silu(normed) if silu else normed).to(x.dtype), before=before, after=after, border=border)


def pad_video(x: torch.Tensor, *, before: int = 0, after: int = 0, border: int = 0) -> torch.Tensor:
    """Repeat frames at both ends and reflect pixels at the borders, as in :func:`pixel_norm`; in channels-last layout.

    Args:
        x: ``[B, C, T, H, W]``, float16, bfloat16 or float32.
    """
    _require_video(x, before, after, border)
    time, height, width = x.shape[2:]
    frame = torch.arange(-before, time + after, device=x.device).clamp(0, time - 1)
    row, column = _reflected(height, border, x.device), _reflected(width, border, x.device)
    pixels = x.permute(0, 2, 3, 4, 1)[:, frame[:, None, None], row[:, None], column]
    return pixels.permute(0, 4, 1, 2, 3).contiguous(memory_format=LAST)


def _reflected(length: int, border: int, device: torch.device) -> torch.Tensor:
    """Positions ``[length + 2 border]`` that a padded axis reads."""
    last = length - 1
    return last - (last - torch.arange(-border, length + border, device=device).abs()).abs()


def _require_video(x: torch.Tensor, before: int, after: int, border: int) -> None:
    checks.require_shape("x", x, ("B", "C", "T", "H", "W"))
    checks.require_dtype("x", x, checks.FLOAT_DTYPES)
    if min(before, after) < 0:
        raise ShapeError(f"before and after must be numbers of frames, got {before} and {after}")
    if border and not 0 < border < min(x.shape[3:]):
        raise ShapeError(f"border must be less than the height and width of x, {list(x.shape[3:])}, got {border}")
