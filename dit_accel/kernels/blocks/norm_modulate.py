"""Gate and residual, LayerNorm and modulation of a block, each in one pass or both in one.

    x' = x + gate * update          y = LayerNorm(x') * (1 + scale) + shift

Some models (Z-Image) have RMSNorm, u / sqrt(mean(u^2) + eps), for LayerNorm, and normalise the update by it too. In
MiniMax-H3 each token takes its gate, scale and shift from a table of timesteps and modalities.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.blocks.quantized_linear import LINEAR_DTYPES, Quantized, quantize_rows
from dit_accel.kernels.custom_ops import eager_op


@eager_op
def norm_modulate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    rms: bool = False,
    rows: torch.Tensor | None = None,
    quantized: Quantized | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``LayerNorm(x) * (1 + scale) + shift``, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x: ``[B, S, C]``, float16, bfloat16 or float32; copied if the last stride is not 1.
        scale, shift: ``[B or 1, S or 1, C]``, floating, of the same shape and dtype; no shift = 0.
        rms: normalise by the root mean square instead, and leave the mean.
        rows: int64 ``[S]``, a row for each token of scale, shift (and gate), which are then ``[B or 1, R, C]``.
        quantized: contiguous ``[B, S, C]``, int8 or float8, and ``[B, S]``, float32; filled with
            :func:`quantize_rows` of the result. None = the result is not quantised.
    """
    return _rows(x, None, None, scale, shift, eps, backend, rms=rms, rows=rows, quantized=quantized)[1]


@eager_op
def add_gated(
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    update_eps: float | None = None,
    rows: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``x + gate * update``, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x, update: ``[B, S, C]``, float16, bfloat16 or float32; of one dtype, unless x is float32; copied if strided.
        gate: ``[B or 1, S or 1, C]``, floating; None = 1.
        update_eps: ``RMSNorm(update)`` is added, with this eps; None = the update itself.
        rows: as for :func:`norm_modulate`.
    """
    return _rows(x, update, gate, None, None, 0.0, backend, update_eps=update_eps, rows=rows)[0]


@eager_op
def add_gated_norm_modulate(
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    rms: bool = False,
    update_eps: float | None = None,
    rows: torch.Tensor | None = None,
    quantized: Quantized | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`add_gated`'s result and :func:`norm_modulate` of it, in the update's dtype, in one pass."""
    options = {"rms": rms, "update_eps": update_eps, "rows": rows, "quantized": quantized}
    return _rows(x, update, gate, scale, shift, eps, backend, **options)


def _rows(
    x, update, gate, scale, shift, eps, backend, *, rms=False, update_eps=None, rows=None, quantized=None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return x' if there is an update, and y if there is a scale."""
    checks.require_floats("x", x, ("B", "S", "C"), strided=True)
    checks.require_typed("x", x, x.shape, checks.FLOAT_DTYPES if x.dtype == torch.float32 else x.dtype, update=update)
    dtype = x.dtype if update is None else update.dtype  # of y
    if rows is not None:
        checks.require_typed("x", x, (x.shape[1],), torch.int64, rows=rows)
        checks.require_unit_stride("rows", rows)
    for name, value in (("gate", gate), ("scale", scale)):
        if value is not None:
            _require_modulation(x, rows, name, value)
    if scale is not None:
        checks.require_same("scale", scale, tuple(scale.shape), shift=shift)
    if quantized is not None:
        checks.require_typed("x", x, tuple(x.shape), tuple(LINEAR_DTYPES.values()), **{"quantized[0]": quantized[0]})
        checks.require_typed("x", x, tuple(x.shape[:2]), torch.float32, **{"quantized[1]": quantized[1]})
    summed = normed = None
    if resolve_backend(backend, x, {"triton": checks.width_limit(x.shape[-1])}) == "triton":
        from dit_accel.kernels._triton.norm_modulate import rows_into

        if update is not None:
            summed = torch.empty_like(x, memory_format=torch.contiguous_format)
        if scale is not None:
            normed = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        rows_into(x, update, gate, scale, shift, rows, eps, summed, normed, quantized, rms=rms, update_eps=update_eps)
        return summed, normed
    if rows is not None:
        gate, scale, shift = (None if value is None else value[:, rows] for value in (gate, scale, shift))
    if update is not None:
        update = update.float() if update_eps is None else F.rms_norm(update.float(), update.shape[-1:], eps=update_eps)
        x = summed = (x.float() + (update if gate is None else gate.float() * update)).to(x.dtype)
    if scale is not None:
        unit = (F.rms_norm if rms else F.layer_norm)(x.float(), x.shape[-1:], eps=eps)
        normed = unit * (1 + scale.float())
        normed = (normed if shift is None else normed + shift.float()).to(dtype)
    if quantized is not None:
        kind = next(name for name, kind in LINEAR_DTYPES.items() if kind is quantized[0].dtype)
        for out, item in zip(quantized, quantize_rows(normed, dtype=kind, backend="reference"), strict=True):
            out.copy_(item)
    return summed, normed


def _require_modulation(x: torch.Tensor, rows: torch.Tensor | None, name: str, value: torch.Tensor) -> None:
    """Check that the value broadcasts to x, or has rows for its tokens, and x's device."""
    batch, tokens, width = x.shape
    shape = value.shape
    fits = len(shape) == 3 and shape[0] in (1, batch) and shape[2] == width
    if not fits or not (shape[1] in (1, tokens) or rows is not None):
        count = f"{tokens} or 1" if rows is None else "R"
        raise ShapeError(f"{name} must have shape [{batch} or 1, {count}, {width}], got {list(shape)}")
    checks.require_dtype(name, value, checks.FLOAT_DTYPES)
    checks.require_device(name, value, "x", x)
