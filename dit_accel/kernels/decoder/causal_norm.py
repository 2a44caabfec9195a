"""RMS normalisation and SiLU of video features, behind the frames that a causal convolution reads first.

    y = SiLU((x + c) / ||x + c|| * sqrt(C) * weight)          out = [past | y] along time

The norm is that of a pixel's C channels. ``c`` is the bias of the previous convolution. A causal convolution over time
reads two frames before the first one, either kept by earlier calls or zeros. Here both are one tensor, so nothing is
padded or concatenated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op

LAST = torch.channels_last_3d
SMALLEST = 1e-12  # norm that is divided by


@eager_op
def causal_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    past: torch.Tensor | None = None,
    *,
    frames: int = 2,
    border: int = 0,
    silu: bool = True,
    input_bias: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each pixel, in float32 and rounded once, behind frames of the past. Forward only: no gradient flows.

    Args:
        x: ``[B, C, T, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        weight: ``[C]``, any float dtype.
        past: ``[B, C, P, H, W]`` like x, P up to ``frames``: what lies before, already normalised; missing frames are
            zeros.
        frames: number of frames before the first one.
        border: zeros on each side of rows and columns.
        input_bias: ``[C]``, added to x before; None = nothing.

    Returns:
        ``[B, C, frames + T, H + 2 border, W + 2 border]`` like x, in channels-last layout, and a copy of its last two
        frames without their border, the past of the next call.
    """
    checks.require_floats("x", x, ("B", "C", "T", "H", "W"), strided=True)
    batch, channels, time, height, width = x.shape
    checks.require_typed("x", x, (channels,), weight=weight, input_bias=input_bias)
    checks.require_same("x", x, (batch, channels, "P", height, width), past=past)
    if past is not None and past.shape[2] > frames:
        raise ShapeError(f"past must have at most {frames} frames, got {past.shape[2]}")
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.causal_norm import norm_into

        out = x.new_empty(batch, frames + time, height + 2 * border, width + 2 * border, channels)
        kept = x.new_empty(batch, min(2, frames + time), height, width, channels)
        past = None if past is None else past.contiguous(memory_format=LAST)
        weight, input_bias = (vector if vector is None else vector.contiguous() for vector in (weight, input_bias))
        norm_into(x.contiguous(memory_format=LAST), weight, silu, input_bias, past, out, kept, border)
        return out.permute(0, 4, 1, 2, 3), kept.permute(0, 4, 1, 2, 3)
    values = x.float() if input_bias is None else x.float() + input_bias.float()[:, None, None, None]
    normed = F.normalize(values, dim=1, eps=SMALLEST) * channels**0.5 * weight.float()[:, None, None, None]
    padded = (F.silu(normed) if silu else normed).to(x.dtype)
    padded = padded if past is None else torch.cat([past, padded], 2)
    padded = F.pad(padded, (0, 0, 0, 0, frames + time - padded.shape[2], 0))
    out = F.pad(padded, (border, border, border, border, 0, 0)).contiguous(memory_format=LAST)
    return out, padded[:, :, -2:].clone(memory_format=LAST)
