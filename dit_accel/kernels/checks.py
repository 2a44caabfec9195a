"""Argument checks that the ops share. Each error names the argument, the requirement and the value."""

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.constants import MAX_WIDTH_TRITON
from dit_accel.kernels.layout import BLOCK_SIZES
from dit_accel.kernels.symbols import AttentionPlan

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRITON_HEAD_DIMS = (16, 32, 64, 128)
Shape = tuple[int | str, ...]  # the length of an axis, or the name of one of any length


def require_shape(name: str, tensor: torch.Tensor, shape: Shape) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{name} must be a tensor [{', '.join(map(str, shape))}], got {type(tensor).__name__}")
    came = tensor.shape
    if came == shape:
        return
    fits = [required == length or isinstance(required, str) for required, length in zip(shape, came, strict=False)]
    if len(came) != len(shape) or not all(fits):
        raise ShapeError(f"{name} must have shape [{', '.join(map(str, shape))}], got {list(came)}")


def require_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if (found := getattr(tensor, "dtype", type(tensor).__name__)) not in dtypes:
        raise ShapeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {found}")


def require_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise ShapeError(f"{name} must be on {other_name}'s device {other.device}, got {tensor.device}")


def require_unit_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeError(f"{name} must have stride 1 on its last axis, got {list(tensor.stride())}; call .contiguous()")


def require_floats(name: str, tensor: torch.Tensor, shape: Shape, *, strided: bool = False) -> None:
    """Check an op's main argument: a floating dtype, and stride 1 along the last axis unless it may be ``strided``."""
    require_shape(name, tensor, shape)
    require_dtype(name, tensor, FLOAT_DTYPES)
    if not strided:
        require_unit_stride(name, tensor)


def require_same(other_name: str, other: torch.Tensor, shape: Shape, **tensors: torch.Tensor | None) -> None:
    """Check that tensors have a shape, and the other's dtype and device; None is none of them."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require_shape(name, tensor, shape)
        if tensor.dtype != other.dtype or tensor.device != other.device:
            rule = f"{name} must have {other_name}'s dtype and device, {other.dtype} on {other.device}"
            raise ShapeError(f"{rule}, got {tensor.dtype} on {tensor.device}")


def require_like(other_name: str, other: torch.Tensor, shape: Shape, **tensors: torch.Tensor | None) -> None:
    """:func:`require_same`, and stride 1 along the last axis."""
    require_same(other_name, other, shape, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None:
            require_unit_stride(name, tensor)


def require_typed(
    other_name: str,
    other: torch.Tensor,
    shape: Shape,
    dtypes: torch.dtype | tuple[torch.dtype, ...] = FLOAT_DTYPES,
    **tensors: torch.Tensor | None,
) -> None:
    """Check that tensors have a shape, one of these dtypes, and the other's device; None is none of them."""
    for name, tensor in tensors.items():
        if tensor is not None:
            require_shape(name, tensor, shape)
            require_dtype(name, tensor, dtypes if isinstance(dtypes, tuple) else (dtypes,))
            require_device(name, tensor, other_name, other)


def require_block(block: int) -> None:
    if block not in BLOCK_SIZES:
        raise ShapeError(f"block must be one of {BLOCK_SIZES}, got {block}")


def require_plan(plan: AttentionPlan, name: str, tensor: torch.Tensor, heads: int | None = None) -> None:
    """Check that the plan has the tensor's batch, device and, if given, heads."""
    if not isinstance(plan, AttentionPlan):
        raise ShapeError(f"plan must be an AttentionPlan from lower or plan, got {type(plan).__name__}")
    required = (tensor.shape[0], plan.heads if heads is None else heads)
    if (plan.batch, plan.heads) != required:
        found = f"{list(required)}, got {[plan.batch, plan.heads]}"
        raise ShapeError(f"plan must have the batch and heads of {name}, {found}; lower symbols of the same shape")
    require_device("plan", plan.mask64, name, tensor)


def require_whole_plan(plan: AttentionPlan, q: torch.Tensor) -> None:
    """Check that the plan covers all tokens of queries ``[B, S, H, D]``."""
    require_plan(plan, "q", q, q.shape[2])
    if plan.tokens != q.shape[1]:
        raise ShapeError(f"plan must have q's {q.shape[1]} tokens, got {plan.tokens}; lower symbols of the same length")


def require_stream(plan: AttentionPlan, name: str, length: int, offset: int) -> None:
    """Check that tokens ``offset .. offset + length`` lie inside the plan's sequence."""
    if offset < 0 or offset + length > plan.tokens:
        rule = f"{name} must lie inside the plan's {plan.tokens} tokens"
        raise ShapeError(f"{rule}, got tokens {offset} to {offset + length}; check offset and plan.tokens")


def width_limit(width: int) -> str | None:
    """Return why the Triton kernels that hold a row in registers do not support its features, or None."""
    return f"it takes at most {MAX_WIDTH_TRITON} features, got {width}" if width > MAX_WIDTH_TRITON else None


def triton_limit(head_dim: int, plan: AttentionPlan | None = None) -> str | None:
    """Return why the Triton kernels do not support a head dimension or the plan's blocks, or None."""
    if head_dim not in TRITON_HEAD_DIMS:
        return f"head_dim must be one of {TRITON_HEAD_DIMS}, got {head_dim}"
    if plan is not None and plan.block not in BLOCK_SIZES:
        return f"plan.block must be one of {BLOCK_SIZES}, got {plan.block}"
    return None
