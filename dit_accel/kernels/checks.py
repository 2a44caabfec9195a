"""Argument checks that the ops share. Each error names the argument, what was required and what came."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.symbols import AttentionPlan

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRITON_HEAD_DIMS = (16, 32, 64, 128)


def forward_only(op: Callable) -> Callable:
    """``torch.no_grad()`` around an op; where gradients are off already, as in pipelines, without its 4 us."""
    guarded = torch.no_grad()(op)

    @functools.wraps(op)
    def call(*args, **kwargs):
        return (guarded if torch.is_grad_enabled() else op)(*args, **kwargs)

    return call


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int | str, ...]) -> None:
    """``shape`` holds a number for an axis of known length and a name for a free one."""
    came = tensor.shape
    if came == shape:
        return
    fits = [required == length or isinstance(required, str) for required, length in zip(shape, came, strict=False)]
    if len(came) != len(shape) or not all(fits):
        raise ShapeError(f"{name} must have shape [{', '.join(map(str, shape))}], got {list(came)}")


def require_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ShapeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def require_same(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Both tensors have one dtype and one device."""
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise ShapeError(
            f"{name} must have {other_name}'s dtype and device, {other.dtype} on {other.device}, "
            f"got {tensor.dtype} on {tensor.device}"
        )


def require_unit_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeError(
            f"{name} must have stride 1 along its last axis, got strides {list(tensor.stride())}; call .contiguous()"
        )


def require_plan(plan: AttentionPlan, name: str, tensor: torch.Tensor, heads: int | None = None) -> None:
    """The plan has the batch (and the heads) of the tensor it is used with, and its device."""
    required = (tensor.shape[0], plan.heads if heads is None else heads)
    if (plan.batch, plan.heads) != required:
        raise ShapeError(
            f"plan must have the batch and heads of {name}, {list(required)}, got {[plan.batch, plan.heads]}; "
            "lower symbols of the same shape"
        )
    if plan.mask64.device != tensor.device:
        raise ShapeError(f"plan must be on {name}'s device {tensor.device}, got {plan.mask64.device}")


def require_stream(plan: AttentionPlan, name: str, length: int, offset: int) -> None:
    """Tokens ``offset .. offset + length`` lie inside the plan's sequence."""
    if offset < 0 or offset + length > plan.tokens:
        raise ShapeError(
            f"{name} must lie inside the plan's {plan.tokens} tokens, got tokens {offset} to {offset + length}; "
            "check offset and plan.tokens"
        )


def triton_head_dim_limit(head_dim: int) -> str | None:
    """What keeps the Triton kernels from a head dimension, or None."""
    return None if head_dim in TRITON_HEAD_DIMS else f"head_dim must be one of {TRITON_HEAD_DIMS}, got {head_dim}"
