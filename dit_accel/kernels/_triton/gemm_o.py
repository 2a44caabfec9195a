"""GEMM-O: one program per (row-block, N tile); the reduction runs over the wanted heads only.

A row-block's heads are the set bits of one 64-bit word, taken from the lowest up. The reduction is one loop over
``count * PARTS`` steps of ``K_TILE`` columns, so the next head is loaded while the current one is multiplied.
"""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.configs import config
from dit_accel.kernels._triton.launch import lowest_head, on_device, precision, set_bits
from dit_accel.kernels.layout import block_count


@triton.jit
def _add_heads(
    acc, word, o_tile, o_token, o_head, token_valid, weight_tile, weight_row, column_valid,
    BLOCK: tl.constexpr, N_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, K_TILE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``acc + sum_h o_h W_h`` over the heads of ``word``; ``acc`` is ``[block, n_tile]``."""
    PARTS: tl.constexpr = HEAD_DIM // K_TILE
    dim = tl.arange(0, K_TILE)
    o_offsets = tl.arange(0, BLOCK)[:, None] * o_token + dim[None, :]  # [block, k_tile]
    weight_offsets = tl.arange(0, N_TILE)[None, :] * weight_row + dim[:, None]  # [k_tile, n_tile]
    remaining = word
    for step in tl.range(0, set_bits(word) * PARTS, num_stages=STAGES):
        head = lowest_head(remaining).to(tl.int64)
        part = step % PARTS
        features = tl.load(o_tile + (head * o_head + part * K_TILE) + o_offsets, token_valid, other=0.0)
        columns = tl.load(weight_tile + (head * HEAD_DIM + part * K_TILE) + weight_offsets, column_valid, other=0.0)
        acc = tl.dot(features, columns, acc, input_precision=PRECISION)
        remaining = tl.where(part == PARTS - 1, remaining & (remaining - 1), remaining)
    return acc


@triton.jit
def _gemm_o(
    o, weight, bias, stack, stack_weights, out, mask64, mask64_before,
    o_batch, o_token, o_head, weight_row,
    heads, blocks, first_block, row_blocks, offset, length, columns, stack_entry,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ENTRIES: tl.constexpr,
    REBASE: tl.constexpr, REUSED: tl.constexpr, COMPUTED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile, starting from the bias or from the weighted sum of ENTRIES stack entries.

    With REUSED the reused heads are added and the sum is stored in ``stack``. With COMPUTED the other heads are added
    then, and the sum is stored in ``out``. REBASE starts from a negated stack entry made under ``mask64_before``: heads
    that compute now but did not before are added, the sum is negated, and heads that no longer compute are added.
    """
    column_tiles = tl.cdiv(columns, N_TILE)
    program = tl.program_id(0).to(tl.int64)  # (b * row_blocks + row_block) * column_tiles + column_tile
    row_block = first_block + program // column_tiles % row_blocks
    batch = program // column_tiles // row_blocks
    first_token = row_block * BLOCK - offset  # in o and out; negative if the stream begins inside the block
    stream_token = first_token + tl.arange(0, BLOCK)
    token_valid = ((stream_token >= 0) & (stream_token < length))[:, None]
    first_column = program % column_tiles * N_TILE
    column = first_column + tl.arange(0, N_TILE)
    column_valid = (column < columns)[None, :]
    o_tile = o + batch * o_batch + first_token * o_token
    weight_tile = weight + first_column * weight_row
    cell = (batch * length + stream_token[:, None]) * columns + column[None, :]  # in [B, S, N]
    cell_valid = token_valid & column_valid

    word = tl.load(mask64 + batch * blocks + row_block)
    acc = tl.zeros([BLOCK, N_TILE], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + column, column < columns, other=0.0).to(tl.float32)[None, :]
    for entry in tl.static_range(ENTRIES):
        biases = tl.load(stack + entry * stack_entry + cell, cell_valid, other=0.0)
        acc += stack_weights[entry] * biases.to(tl.float32)
    if REBASE:
        before = tl.load(mask64_before + batch * blocks + row_block)
        acc = -_add_heads(
            acc, word & ~before, o_tile, o_token, o_head, token_valid, weight_tile, weight_row, column_valid,
            BLOCK, N_TILE, HEAD_DIM, K_TILE, PRECISION, STAGES,
        )  # fmt: skip
        word = before & ~word
    if REUSED:
        position = tl.arange(0, 64)
        every_head = tl.sum(tl.where(position < heads, tl.full([64], 1, tl.int64) << position, 0), 0)
        acc = _add_heads(
            acc, every_head & ~word, o_tile, o_token, o_head, token_valid, weight_tile, weight_row, column_valid,
            BLOCK, N_TILE, HEAD_DIM, K_TILE, PRECISION, STAGES,
        )  # fmt: skip
        tl.store(stack + cell, acc.to(stack.dtype.element_ty), cell_valid)
    if COMPUTED:
        acc = _add_heads(
            acc, word, o_tile, o_token, o_head, token_valid, weight_tile, weight_row, column_valid,
            BLOCK, N_TILE, HEAD_DIM, K_TILE, PRECISION, STAGES,
        )  # fmt: skip
        tl.store(out + cell, acc.to(out.dtype.element_ty), cell_valid)


def update(o, weight, bias, plan, history, previous, offset) -> tuple[torch.Tensor, torch.Tensor]:
    out = o.new_empty(*o.shape[:2], weight.shape[0])
    stack = o.new_empty(1 + len(history), *out.shape)
    _launch(o, weight, bias, plan, stack[0], (), offset, out, reused=True)
    for entry, (features, biases) in enumerate(zip(history, stack[1:], strict=True)):
        if previous is None:
            _launch(features, weight, bias, plan, biases, (), offset, None, reused=True)
        else:
            before, mask64 = previous
            _launch(features, weight, None, plan, before[entry], (-1.0,), offset, biases, mask64)
    return out, stack


def dispatch_into(o, weight, plan, stack, weights, offset, out) -> None:
    _launch(o, weight, None, plan, stack, tuple(map(float, weights)), offset, out)


def _launch(o, weight, bias, plan, stack, stack_weights, offset, out, mask64_before=None, reused=False) -> None:
    batch, length, heads, head_dim = o.shape
    columns, first_block = weight.shape[0], offset // plan.block
    row_blocks = block_count(offset + length, plan.block) - first_block
    sizes = config("GEMM-O", o)
    sizes = sizes | {"K_TILE": min(sizes["K_TILE"], head_dim)}
    with on_device(o):
        _gemm_o[(batch * row_blocks * triton.cdiv(columns, sizes["N_TILE"]),)](
            o, weight, bias, stack, stack_weights, out, plan.mask64, mask64_before, *o.stride()[:3], weight.stride(0),
            heads, plan.blocks, first_block, row_blocks, offset, length, columns, stack.stride(0),
            BLOCK=plan.block, HEAD_DIM=head_dim, HAS_BIAS=bias is not None, ENTRIES=len(stack_weights),
            REBASE=mask64_before is not None, PRECISION=precision(o),
            REUSED=reused, COMPUTED=out is not None, **sizes,
        )  # fmt: skip
