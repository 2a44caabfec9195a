"""Ops of an autoencoder in channels-last layout: group normalisation with SiLU, the sum behind a residual block, and
nearest upsampling. In a compiled model results are contiguous instead.

    y = SiLU((x + c - mean_g) / sqrt(var_g + eps) * weight + bias)          z = x + update + bias

Mean and variance are those of the features of a group over all pixels (Wu and He 2018, arXiv 1803.08494). ``c`` is the
bias of the convolution before, one number a channel, so that the convolution need not add it in a pass of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import custom_op, like

LAST = torch.channels_last


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=LAST)


@custom_op(like("x"))
def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    groups: int,
    eps: float,
    silu: bool = True,
    input_bias: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Normalise groups of channels, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x: ``[B, C, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        weight, bias: ``[C]``, any float dtype.
        groups: number of groups, which must divide C.
        eps: added to the variance.
        silu: apply SiLU to the result.
        input_bias: ``[C]``, added to x before; None = nothing.
        backend: "auto", "reference" or "triton".

    Returns:
        Like x, in channels-last layout.
    """
    _require_image(x)
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ShapeError(f"groups must divide the {channels} channels of x, got {groups}")
    _require_channels(x, weight=weight, bias=bias, input_bias=input_bias)
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.group_norm import group_norm_into

        out = _empty(x)
        group_norm_into(x.contiguous(memory_format=LAST), weight, bias, groups, eps, silu, input_bias, out)
        return out
    values = x.float() if input_bias is None else x.float() + input_bias.float()[:, None, None]
    normed = F.group_norm(values, groups, weight.float(), bias.float(), eps)
    return (F.silu(normed) if silu else normed).to(x.dtype).contiguous(memory_format=LAST)


@custom_op(like("x"))
def add_residual(
    x: torch.Tensor, update: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """``x + update + bias``, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x, update: ``[B, C, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        bias: ``[C]``, any float dtype; None = nothing.
        backend: "auto", "reference" or "triton".

    Returns:
        Like x, in channels-last layout.
    """
    _require_image(x)
    checks.require_shape("update", update, tuple(x.shape))
    checks.require_same("update", update, "x", x)
    _require_channels(x, bias=bias)
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.group_norm import add_residual_into

        out = _empty(x)
        add_residual_into(x.contiguous(memory_format=LAST), update.contiguous(memory_format=LAST), bias, out)
        return out
    total = x.float() + update.float()
    total = total if bias is None else total + bias.float()[:, None, None]
    return total.to(x.dtype).contiguous(memory_format=LAST)


def _doubled(x: torch.Tensor, **_) -> torch.Tensor:
    batch, channels, height, width = x.shape
    return x.new_empty(batch, channels, 2 * height, 2 * width)


@custom_op(_doubled)
def upsample_nearest(x: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Repeat each pixel twice in both directions. Forward only: no gradient flows.

    Args:
        x: ``[B, C, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        backend: "auto", "reference" or "triton".

    Returns:
        ``[B, C, 2H, 2W]`` like x, in channels-last layout.
    """
    _require_image(x)
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.group_norm import upsample_into

        batch, channels, height, width = x.shape
        out = x.new_empty(batch, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)
        upsample_into(x.contiguous(memory_format=LAST), out)
        return out
    return F.interpolate(x, scale_factor=2.0, mode="nearest").contiguous(memory_format=LAST)


def _require_image(x: torch.Tensor) -> None:
    checks.require_shape("x", x, ("B", "C", "H", "W"))
    checks.require_dtype("x", x, checks.FLOAT_DTYPES)


def _require_channels(x: torch.Tensor, **vectors: torch.Tensor | None) -> None:
    """Raises unless each vector has one number a channel, on the device of x."""
    for name, vector in vectors.items():
        if vector is not None:
            checks.require_shape(name, vector, (x.shape[1],))
            if vector.device != x.device:
                raise ShapeError(f"{name} must be on {x.device}, as x is, got {vector.device}")
