"""Weighted sum of remembered features, over all elements or over the rows that a plan reuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device
from dit_accel.kernels.symbols import AttentionPlan

ELEMENTS = 1024  # elements per program
WARPS = 4
ROW_TOKENS = 64  # tokens of a row-block per program
ROW_WARPS = 4


@triton.jit
def _sum_everything(
    history, strides, weights, out, out_stride, rows, columns,
    ENTRIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % chunks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    valid = (row < rows) & (column < columns)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for entry in tl.static_range(ENTRIES):
        features = tl.load(history[entry] + row * strides[entry] + column, valid, other=0.0)
        total += weights[entry] * features.to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), valid)


@triton.jit
def _sum_reused_rows(
    history, weights, out, mask64, out_batch, out_token, out_head, heads, blocks, tokens, head_dim,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    part = (tl.program_id(0) // heads).to(tl.int64)  # TOKENS of the tokens of a row-block
    parts = BLOCK // TOKENS
    if (tl.load(mask64 + part // parts) >> head.to(tl.int64) & 1) == 1:
        return
    batch = part // parts // blocks
    token = (part % (blocks * parts) * TOKENS + tl.arange(0, TOKENS))[:, None]
    dim = tl.arange(0, DIM_TILE)[None, :]
    valid = (token < tokens) & (dim < head_dim)
    cell = ((batch * tokens + token) * heads + head) * head_dim + dim  # in a contiguous [B, S, H, D]
    total = tl.zeros([TOKENS, DIM_TILE], tl.float32)
    for entry in tl.static_range(ENTRIES):
        total += weights[entry] * tl.load(history[entry] + cell, valid, other=0.0).to(tl.float32)
    pointers = out + batch * out_batch + token * out_token + head * out_head + dim
    tl.store(pointers, total.to(out.dtype.element_ty), valid)


def weighted_sum_into(
    history: Sequence[torch.Tensor], weights: Sequence[float], plan: AttentionPlan | None, out: torch.Tensor
) -> None:
    weights = tuple(map(float, weights))
    if plan is None:
        _sum_everything_into(history, weights, out)
        return
    history = tuple(features.contiguous() for features in history)
    batch, tokens, heads, head_dim = out.shape
    with on_device(out):
        _sum_reused_rows[(batch * plan.blocks * (plan.block // ROW_TOKENS) * heads,)](
            history, weights, out, plan.mask64, *out.stride()[:3], heads, plan.blocks, tokens, head_dim,
            ENTRIES=len(history), BLOCK=plan.block, TOKENS=ROW_TOKENS, DIM_TILE=triton.next_power_of_2(head_dim),
            num_warps=ROW_WARPS,
        )  # fmt: skip


def _sum_everything_into(history: Sequence[torch.Tensor], weights: tuple[float, ...], out: torch.Tensor) -> None:
    if not out.numel():
        return
    columns = min(_contiguous_tail(x) for x in (*history, out))
    entries = [_as_rows(features, columns) for features in history]
    entries = [
        features.contiguous().view(-1, columns) if x is None else x
        for x, features in zip(entries, history, strict=True)
    ]
    target = _as_rows(out, columns)
    written = out.new_empty(out.numel() // columns, columns) if target is None else target
    tile = min(triton.next_power_of_2(columns), ELEMENTS)
    rows = min(triton.next_power_of_2(len(written)), ELEMENTS // tile)
    with on_device(out):
        _sum_everything[(triton.cdiv(len(written), rows) * triton.cdiv(columns, tile),)](
            tuple(entries), tuple(x.stride(0) for x in entries), weights, written, written.stride(0), *written.shape,
            ENTRIES=len(history), ROWS=rows, COLUMNS=tile, num_warps=WARPS,
        )  # fmt: skip
    if target is None:
        out.copy_(written.view(out.shape))


def _contiguous_tail(x: torch.Tensor) -> int:
    """Number of elements of the trailing axes that are contiguous in memory."""
    length = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size != 1 and stride != length:
            break
        length *= size
    return length


def _as_rows(x: torch.Tensor, columns: int) -> torch.Tensor | None:
    """Return a view ``[rows, columns]``, or None if the rows are not evenly spaced."""
    try:
        return x.view(-1, columns)
    except RuntimeError:
        return None
