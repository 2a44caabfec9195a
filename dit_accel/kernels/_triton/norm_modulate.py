"""Gate, residual, LayerNorm or RMSNorm, and modulation: one program per token, which holds its row in registers.

Mean and variance are computed from the rounded sum, as if the two steps were separate, in two passes over the
registers. At 33024 × 3072 in bf16 on one H200 gate, residual, norm and modulation take 0.23 ms (3.6 TB/s), and 0.27 ms
with four tokens per program.
"""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, next_power_of_2


@triton.jit
def _load_row(base, offset, feature, inside):
    return tl.load(base + offset + feature, inside, other=0.0).to(tl.float32)


@triton.jit
def _gate_norm_modulate(
    x, update, gate, scale, shift, rows, summed, normed,
    x_batch, x_token, update_batch, update_token, gate_batch, gate_token, modulation_batch, modulation_token,
    tokens, width, eps, update_eps,
    HAS_UPDATE: tl.constexpr, NORMS_UPDATE: tl.constexpr, HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr,
    RMS: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    batch, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    feature = tl.arange(0, FEATURES)
    inside = feature < width
    modulated = tl.load(rows + token) if HAS_ROWS else token
    row = _load_row(x, batch * x_batch + token * x_token, feature, inside)
    written = (batch * tokens + token) * width + feature
    if HAS_UPDATE:
        updates = _load_row(update, batch * update_batch + token * update_token, feature, inside)
        if NORMS_UPDATE:
            updates *= tl.rsqrt(tl.sum(updates * updates, 0) / width + update_eps)
        if HAS_GATE:
            updates *= _load_row(gate, batch * gate_batch + modulated * gate_token, feature, inside)
        rounded = (row + updates).to(summed.dtype.element_ty)
        tl.store(summed + written, rounded, inside)
        row = rounded.to(tl.float32)
    if HAS_NORM:
        modulation = batch * modulation_batch + modulated * modulation_token
        if not RMS:
            row = tl.where(inside, row - tl.sum(row, 0) / width, 0.0)
        unit = row * tl.rsqrt(tl.sum(row * row, 0) / width + eps)
        y = unit * (1.0 + _load_row(scale, modulation, feature, inside))
        if HAS_SHIFT:
            y += _load_row(shift, modulation, feature, inside)
        tl.store(normed + written, y.to(normed.dtype.element_ty), inside)


def rows_into(x, update, gate, scale, shift, rows, eps, summed, normed, *, rms, update_eps) -> None:
    """Fill ``summed`` if there is an update, and ``normed`` if there is a scale; both are contiguous ``[B, S, C]``."""
    batch, tokens, width = x.shape
    features = next_power_of_2(width)
    x, update, gate, scale, shift = (_side_by_side(tensor) for tensor in (x, update, gate, scale, shift))
    if shift is not None and scale.stride() != shift.stride():
        scale, shift = scale.contiguous(), shift.contiguous()
    strides = (*x.stride()[:2], *_strides(update), *_strides(gate), *_strides(scale))
    launch(
        _gate_norm_modulate, batch * tokens, (x, update, gate, scale, shift, rows, summed, normed),
        (*strides, tokens, width, float(eps), float(update_eps or 0.0)),
        HAS_UPDATE=update is not None, NORMS_UPDATE=update_eps is not None, HAS_GATE=gate is not None,
        HAS_NORM=scale is not None, RMS=rms, HAS_SHIFT=shift is not None, HAS_ROWS=rows is not None,
        FEATURES=features, num_warps=min(max(features // 512, 1), 8),
    )  # fmt: skip


def _side_by_side(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``x`` with contiguous features per token."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _strides(x: torch.Tensor | None) -> tuple[int, int]:
    """Strides of batch and token, 0 along axes that broadcast."""
    if x is None:
        return 0, 0
    (batch, tokens, _), (batch_stride, token_stride, _) = x.shape, x.stride()
    return batch_stride if batch > 1 else 0, token_stride if tokens > 1 else 0
