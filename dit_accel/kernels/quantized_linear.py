"""Linear layers in 8 bits: rows are quantised as they come, weights once, with a scale a token and an output feature.

    x_i = s_i u_i      W_n = t_n w_n      (x W^T)_in = s_i t_n sum_k u_ik w_nk      s_i = max |x_i| / largest value

Matrix units multiply 8 bits twice as fast as bfloat16. int8 steps are even: a row of normal values errs by 0.8%. float8
e4m3 has 3 bits of mantissa and errs by 2.6%, but bears values of very different size. What quantises a row does on the
way what would else be passes of their own: GELU, and putting two rows side by side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import custom_op
from dit_accel.kernels.norm_modulate import MAX_WIDTH_TRITON

LINEAR_DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 1e-12  # of a row of zeros
EVEN = 16  # features on both sides of a layer must be a multiple of it, for copies of 16 bytes


def _empty_rows(x: torch.Tensor, gelu: torch.Tensor | None, dtype: str, **_) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1] + (0 if gelu is None else gelu.shape[-1])
    values = torch.empty(*x.shape[:-1], width, dtype=LINEAR_DTYPES[dtype], device=x.device)
    return values, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@custom_op(_empty_rows)
def quantize_rows(
    x: torch.Tensor, gelu: torch.Tensor | None = None, *, dtype: str, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 8 bits, with a scale each: of ``x``, and behind it of GELU of another tensor.

    Args:
        x: ``[..., C]``, float16, bfloat16 or float32; C may be 0.
        gelu: ``[..., M]`` like x, before GELU (tanh approximation); None = nothing.
        dtype: "int8" or "float8" (e4m3).
        backend: "auto", "reference" or "triton" (at most 16384 features of each).

    Returns:
        Values ``[..., C + M]``, and the scales ``[...]``, float32, that they are multiplied by.

    Raises:
        ShapeError, UnsupportedError, BackendError: as every op of :mod:`dit_accel.kernels`.
    """
    if dtype not in LINEAR_DTYPES:
        raise ShapeError(f"dtype must be one of {tuple(LINEAR_DTYPES)}, got {dtype!r}")
    checks.require_dtype("x", x, checks.FLOAT_DTYPES)
    if gelu is not None:
        checks.require_shape("gelu", gelu, (*x.shape[:-1], "M"))
        checks.require_same("gelu", gelu, "x", x)
    widest = max(x.shape[-1], 0 if gelu is None else gelu.shape[-1])
    limit = f"it takes at most {MAX_WIDTH_TRITON} features, got {widest}" if widest > MAX_WIDTH_TRITON else None
    if resolve_backend(backend, x, {"triton": limit}) == "triton":
        from dit_accel.kernels._triton.quantized_linear import rows_into

        values, scales = _empty_rows(x, gelu, dtype)
        rows_into(*(part if part is None else part.flatten(0, -2) for part in (x, gelu)), values, scales)
        return values, scales
    rows = x.float()
    if gelu is not None:
        rows = torch.cat([rows, F.gelu(gelu.float(), approximate="tanh")], dim=-1)
    kind = LINEAR_DTYPES[dtype]
    scales = (rows.abs().amax(-1) / LARGEST[kind]).clamp(min=SMALLEST_SCALE)
    units = rows * (1 / scales)[..., None]
    return ((units + 0.5).floor() if kind is torch.int8 else units).to(kind), scales


def _empty_product(values: torch.Tensor, weight: torch.Tensor, out_dtype: str, **_) -> torch.Tensor:
    return torch.empty(*values.shape[:-1], len(weight), dtype=getattr(torch, out_dtype), device=values.device)


@custom_op(_empty_product)
def quantized_linear(
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: str,
    backend: str = "auto",
) -> torch.Tensor:
    """``x W^T + b`` of rows and weights that :func:`quantize_rows` gave; sums in int32 or float32, rounded once.

    Args:
        values: ``[..., C]``, int8 or float8 e4m3, C a multiple of 16.
        scales: ``[...]``, float32.
        weight: ``[N, C]`` like values, N a multiple of 16.
        weight_scales: ``[N]``, float32.
        bias: ``[N]``, floating, or None.
        out_dtype: "float16", "bfloat16" or "float32".
        backend: "auto", "reference" or "triton".

    Returns:
        ``[..., N]``.

    Raises:
        ShapeError, UnsupportedError, BackendError: as every op of :mod:`dit_accel.kernels`.
    """
    checks.require_dtype("values", values, tuple(LARGEST))
    checks.require_unit_stride("values", values)
    checks.require_typed("scales", scales, values.shape[:-1], torch.float32, "values", values)
    checks.require_like("weight", weight, ("N", values.shape[-1]), "values", values)
    checks.require_typed("weight_scales", weight_scales, (len(weight),), torch.float32, "values", values)
    if bias is not None:
        checks.require_shape("bias", bias, (len(weight),))
        checks.require_dtype("bias", bias, checks.FLOAT_DTYPES)
        checks.require_device("bias", bias, "values", values)
    names = tuple(str(dtype).removeprefix("torch.") for dtype in checks.FLOAT_DTYPES)
    if out_dtype not in names:
        raise ShapeError(f"out_dtype must be one of {names}, got {out_dtype!r}")
    if values.shape[-1] % EVEN or len(weight) % EVEN:
        raise ShapeError(f"weight must have sides that are multiples of {EVEN}, got {list(weight.shape)}")
    if resolve_backend(backend, values) == "triton":
        from dit_accel.kernels._triton.quantized_linear import product_into

        out = _empty_product(values, weight, out_dtype)
        product_into(values, scales, weight, weight_scales, bias, out)
        return out
    product = F.linear(values.float(), weight.float()) * scales[..., None] * weight_scales
    return (product if bias is None else product + bias.float()).to(getattr(torch, out_dtype))
