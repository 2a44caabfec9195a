"""GEMM-O: one program a (row-block, N tile); the reduction walks only the heads that are wanted.

A row-block's heads are the set bits of one 64-bit word, taken from the lowest up. The walk is one loop over ``count *
PARTS`` steps of ``K_TILE`` columns, so loads of the next head are in flight while this one is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import count_heads, is_hopper_or_later, lowest_head, on_device
from dit_accel.layout import block_count
from dit_accel.symbols import AttentionPlan


@triton.jit
def _add_heads(
    acc, word, o_rows, o_head, token_valid, weight_columns, column_valid,
    HEAD_DIM: tl.constexpr, K_TILE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``acc + sum_h o_h W_h`` over the heads of ``word``; ``acc`` is ``[block, n_tile]``."""
    PARTS: tl.constexpr = HEAD_DIM // K_TILE
    part_dim = tl.arange(0, K_TILE)
    remaining = word
    for step in tl.range(0, count_heads(word) * PARTS, num_stages=STAGES):
        head = lowest_head(remaining).to(tl.int64)
        part = step % PARTS
        dim = part * K_TILE + part_dim
        features = tl.load(o_rows + head * o_head + dim[None, :], token_valid, other=0.0)  # [block, k_tile]
        columns = tl.load(weight_columns + head * HEAD_DIM + dim[:, None], column_valid, other=0.0)  # [k_tile, n_tile]
        acc = tl.dot(features, columns, acc, input_precision=PRECISION)
        remaining = tl.where(part == PARTS - 1, remaining & (remaining - 1), remaining)
    return acc


@triton.jit
def _gemm_o(
    o, weight, bias, stack, stack_weights, out, mask64,
    o_batch, o_token, o_head, weight_row,
    heads, blocks, first_block, row_blocks, offset, length, columns, stack_entry,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ENTRIES: tl.constexpr, REUSED: tl.constexpr, COMPUTED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Starts from the bias, or from the weighted sum of ENTRIES stack entries.

    With REUSED the reused heads are added and the sum is stored in ``stack``; with COMPUTED, then, the others are added
    and the sum is stored in ``out``.
    """
    column_tiles = tl.cdiv(columns, N_TILE)
    program = tl.program_id(0).to(tl.int64)  # (b * row_blocks + row_block) * column_tiles + column_tile
    row_block = first_block + program // column_tiles % row_blocks
    batch = program // column_tiles // row_blocks
    stream_token = row_block * BLOCK + tl.arange(0, BLOCK) - offset  # in o and out
    token_valid = ((stream_token >= 0) & (stream_token < length))[:, None]
    column = program % column_tiles * N_TILE + tl.arange(0, N_TILE)
    column_valid = (column < columns)[None, :]
    o_rows = o + batch * o_batch + stream_token[:, None] * o_token
    weight_columns = weight + column[None, :] * weight_row
    cell = (batch * length + stream_token[:, None]) * columns + column[None, :]  # in [B, S, N]
    cell_valid = token_valid & column_valid

    word = tl.load(mask64 + batch * blocks + row_block)
    acc = tl.zeros([BLOCK, N_TILE], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + column, column < columns, other=0.0).to(tl.float32)[None, :]
    for entry in tl.static_range(ENTRIES):
        biases = tl.load(stack + entry * stack_entry + cell, cell_valid, other=0.0)
        acc += stack_weights[entry] * biases.to(tl.float32)
    if REUSED:
        position = tl.arange(0, 64)
        every_head = tl.sum(tl.where(position < heads, tl.full([64], 1, tl.int64) << position, 0), 0)
        acc = _add_heads(
            acc, every_head & ~word, o_rows, o_head, token_valid, weight_columns, column_valid,
            HEAD_DIM, K_TILE, PRECISION, STAGES,
        )  # fmt: skip
        tl.store(stack + cell, acc.to(stack.dtype.element_ty), cell_valid)
    if COMPUTED:
        acc = _add_heads(
            acc, word, o_rows, o_head, token_valid, weight_columns, column_valid, HEAD_DIM, K_TILE, PRECISION, STAGES
        )
        tl.store(out + cell, acc.to(out.dtype.element_ty), cell_valid)


def update(
    o: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: AttentionPlan,
    history: Sequence[torch.Tensor],
    offset: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = o.new_empty(*o.shape[:2], weight.shape[0])
    stack = o.new_empty(1 + len(history), *out.shape)
    _launch(o, weight, bias, plan, stack[0], (), offset, out, REUSED=True, COMPUTED=True)
    for features, biases in zip(history, stack[1:], strict=True):
        _launch(features, weight, bias, plan, biases, (), offset, None, REUSED=True, COMPUTED=False)
    return out, stack


def dispatch_into(
    o: torch.Tensor,
    weight: torch.Tensor,
    plan: AttentionPlan,
    stack: torch.Tensor,
    weights: Sequence[float],
    offset: int,
    out: torch.Tensor,
) -> None:
    _launch(o, weight, None, plan, stack, tuple(map(float, weights)), offset, out, REUSED=False, COMPUTED=True)


def _config(o: torch.Tensor) -> dict[str, int]:
    head_dim = o.shape[-1]
    if o.dtype == torch.float32:
        return {"N_TILE": 64, "K_TILE": min(head_dim, 32), "STAGES": 2, "num_warps": 8}
    if is_hopper_or_later(o):
        return {"N_TILE": 128, "K_TILE": min(head_dim, 64), "STAGES": 4, "num_warps": 8}
    return {"N_TILE": 128, "K_TILE": min(head_dim, 32), "STAGES": 3, "num_warps": 8}


def _launch(o, weight, bias, plan, stack, stack_weights, offset, out, **switches: bool) -> None:
    batch, length, heads, head_dim = o.shape
    columns = weight.shape[0]
    first_block = offset // plan.block
    row_blocks = block_count(offset + length, plan.block) - first_block
    config = _config(o)
    with on_device(o):
        _gemm_o[(batch * row_blocks * triton.cdiv(columns, config["N_TILE"]),)](
            o, weight, bias, stack, stack_weights, out, plan.mask64, *o.stride()[:3], weight.stride(0),
            heads, plan.blocks, first_block, row_blocks, offset, length, columns, stack.stride(0),
            BLOCK=plan.block, HEAD_DIM=head_dim, HAS_BIAS=bias is not None, ENTRIES=len(stack_weights),
            PRECISION="ieee" if o.dtype == torch.float32 else "tf32", **switches, **config,
        )  # fmt: skip
