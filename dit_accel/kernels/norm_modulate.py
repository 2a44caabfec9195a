"""What stands between a block's large operations: gate and residual, LayerNorm and modulation, in one pass each.

    x' = x + gate * update          y = LayerNorm(x') * (1 + scale) + shift

Each is a row of a few thousand features, so memory is all that it costs; plain PyTorch reads and writes the row six
times where once is enough.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.checks import FLOAT_DTYPES, forward_only, require_dtype, require_same, require_shape

MAX_WIDTH_TRITON = 16384  # features of a row, which one program holds


@forward_only
def norm_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float = 1e-6, backend: str = "auto"
) -> torch.Tensor:
    """``LayerNorm(x) * (1 + scale) + shift``, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x: ``[B, S, C]``, float16, bfloat16 or float32; a copy is made where the last stride is not 1.
        scale, shift: ``[B or 1, S or 1, C]``, floating, both of one shape and dtype.
        eps: added to the variance.
        backend: "auto", "reference" or "triton" (at most 16384 features).

    Returns:
        ``[B, S, C]`` like x.

    Raises:
        ShapeError: a shape, dtype, stride or device does not fit.
        UnsupportedError: the backend does not support the width.
        BackendError: ``backend`` can't run here.
    """
    _require_rows(x)
    _require_modulation(x, scale=scale, shift=shift)
    if _resolve(x, backend) == "triton":
        from dit_accel.kernels._triton.norm_modulate import rows_into

        normed = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows_into(x, None, None, scale, shift, eps, None, normed)
        return normed
    return _norm_modulate_reference(x, scale, shift, eps)


@forward_only
def add_gated(
    x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor | None, *, backend: str = "auto"
) -> torch.Tensor:
    """``x + gate * update``, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x, update: ``[B, S, C]``, of one dtype: float16, bfloat16 or float32; copied where the last stride is not 1.
        gate: ``[B or 1, S or 1, C]``, floating; None = 1.
        backend: as for :func:`norm_modulate`, which also names what is raised.

    Returns:
        ``[B, S, C]`` like x.
    """
    _require_rows(x, update=update)
    if gate is not None:
        _require_modulation(x, gate=gate)
    if _resolve(x, backend) == "triton":
        from dit_accel.kernels._triton.norm_modulate import rows_into

        summed = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows_into(x, update, gate, None, None, 0.0, summed, None)
        return summed
    return _add_gated_reference(x, update, gate)


@forward_only
def add_gated_norm_modulate(
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_gated`, and :func:`norm_modulate` of its result, in one pass.

    Returns:
        x' and y, ``[B, S, C]`` like x.
    """
    _require_rows(x, update=update)
    if gate is not None:
        _require_modulation(x, gate=gate)
    _require_modulation(x, scale=scale, shift=shift)
    if _resolve(x, backend) == "triton":
        from dit_accel.kernels._triton.norm_modulate import rows_into

        summed, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        rows_into(x, update, gate, scale, shift, eps, summed, normed)
        return summed, normed
    summed = _add_gated_reference(x, update, gate)
    return summed, _norm_modulate_reference(summed, scale, shift, eps)


def _norm_modulate_reference(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return (normed * (1 + scale.float()) + shift.float()).to(x.dtype)


def _add_gated_reference(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    update = update.float() if gate is None else gate.float() * update.float()
    return (x.float() + update).to(x.dtype)


def _resolve(x: torch.Tensor, backend: str) -> str:
    width = x.shape[-1]
    limit = f"it takes at most {MAX_WIDTH_TRITON} features, got {width}" if width > MAX_WIDTH_TRITON else None
    return resolve_backend(backend, x, {"triton": limit})


def _require_rows(x: torch.Tensor, **others: torch.Tensor) -> None:
    require_shape("x", x, ("B", "S", "C"))
    require_dtype("x", x, FLOAT_DTYPES)
    for name, other in others.items():
        require_shape(name, other, tuple(x.shape))
        require_same(name, other, "x", x)


def _require_modulation(x: torch.Tensor, **values: torch.Tensor) -> None:
    """All of one shape that broadcasts to x's, one dtype and x's device."""
    (first_name, first), *others = values.items()
    batch, tokens, width = x.shape
    shape = first.shape
    fits = len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, tokens) and shape[2] == width
    if not fits:
        raise ShapeError(f"{first_name} must have shape [{batch} or 1, {tokens} or 1, {width}], got {list(shape)}")
    require_dtype(first_name, first, FLOAT_DTYPES)
    if first.device != x.device:
        raise ShapeError(f"{first_name} must be on x's device {x.device}, got {first.device}")
    for name, value in others:
        require_shape(name, value, shape)
        require_same(name, value, first_name, first)
