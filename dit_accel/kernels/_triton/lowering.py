"""Lowering in three launches, none of which needs the host to know a count.

1. one program a row: decodes its bits into ``kv_count`` and ``kv_index`` (and, for head 0, the row-block's ``mask64``);
2. one program a head: the head's rows that compute, by a prefix sum;
3. one program a head and chunk of rows: where each row stands in the work list. Its rank within the head is the number
   of rows that are longer, or as long and earlier, and before the head come all rows of earlier heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device
from dit_accel.symbols import AttentionPlan, SparseSymbols

RANK_ROWS = 32  # rows that a program ranks against all rows of their head


@triton.jit
def _lower_rows(
    cache_bits, skip_bits, mask64, kv_count, kv_index, heads, blocks, head_bytes, row_bytes,
    HAS_SKIP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # (b * H + h) * Tq + i
    row_block = row % blocks
    head = (row // blocks % heads).to(tl.int32)
    batch = row // blocks // heads

    position = tl.arange(0, 64)
    cache_row = cache_bits + (batch * blocks + row_block) * head_bytes
    cache_bytes = tl.load(cache_row + position // 8, position < heads, other=0).to(tl.int64)
    word = tl.sum((cache_bytes >> position % 8 & 1) << position, 0)
    if head == 0:
        tl.store(mask64 + batch * blocks + row_block, word)
    computes = (word >> head.to(tl.int64) & 1).to(tl.int32)

    count = 0
    for start in range(0, blocks * computes, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        if HAS_SKIP:
            bits = tl.load(skip_bits + row * row_bytes + tile // 8, tile < blocks, other=0).to(tl.int32)
            keep = (bits >> tile % 8) & 1
        else:
            keep = (tile < blocks).to(tl.int32)
        keep = tl.where(tile < blocks, keep, 0)
        slot = count + tl.cumsum(keep, 0) - 1
        tl.store(kv_index + row * blocks + slot, tile, keep == 1)
        count += tl.sum(keep, 0)
    tl.store(kv_count + row, count)


@triton.jit
def _lower_heads(mask64, row_count, row_index, heads, blocks, CHUNK: tl.constexpr):
    head_row = tl.program_id(0)  # b * H + h
    batch = head_row // heads
    head = (head_row % heads).to(tl.int64)
    count = 0
    for start in range(0, blocks, CHUNK):
        row_block = start + tl.arange(0, CHUNK)
        word = tl.load(mask64 + batch * blocks + row_block, row_block < blocks, other=0)
        keep = (word >> head & 1).to(tl.int32)
        slot = count + tl.cumsum(keep, 0) - 1
        tl.store(row_index + head_row * blocks + slot, row_block, keep == 1)
        count += tl.sum(keep, 0)
    tl.store(row_count + head_row, count)


@triton.jit
def _lower_work(
    mask64, kv_count, row_count, work, work_count, heads, blocks, head_rows,
    HEAD_ROWS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head_row = tl.program_id(0)
    batch = head_row // heads
    head = (head_row % heads).to(tl.int64)
    other_head = tl.arange(0, HEAD_ROWS)
    counts = tl.load(row_count + other_head, other_head < head_rows, other=0)
    first_slot = tl.sum(tl.where(other_head < head_row, counts, 0), 0)
    if (head_row == 0) & (tl.program_id(1) == 0):
        tl.store(work_count, tl.sum(counts, 0))

    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    word = tl.load(mask64 + batch * blocks + row, row < blocks, other=0)
    computes = (word >> head & 1) == 1
    length = tl.load(kv_count + head_row * blocks + row, row < blocks, other=0)
    rank = tl.zeros([ROWS], tl.int32)
    for start in range(0, blocks, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_word = tl.load(mask64 + batch * blocks + other, other < blocks, other=0)
        other_length = tl.load(kv_count + head_row * blocks + other, other < blocks, other=0)
        other_length = tl.where((other_word >> head & 1) == 1, other_length, -1)  # reused: behind all that compute
        is_longer = other_length[None, :] > length[:, None]
        is_earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None])
        rank += tl.sum((is_longer | is_earlier).to(tl.int32), 1)
    tl.store(work + first_slot + rank, head_row * blocks + row, computes)


def lower_into(symbols: SparseSymbols, plan: AttentionPlan) -> None:
    batch, heads, blocks = plan.batch, plan.heads, plan.blocks
    chunk = min(triton.next_power_of_2(blocks), 1024)
    cache_bits = symbols.cache_bits.contiguous()
    skip_bits = None if symbols.skip_bits is None else symbols.skip_bits.contiguous()
    with on_device(cache_bits):
        _lower_rows[(batch * heads * blocks,)](
            cache_bits, skip_bits, plan.mask64, plan.kv_count, plan.kv_index, heads, blocks,
            cache_bits.shape[-1], triton.cdiv(blocks, 8), HAS_SKIP=skip_bits is not None, CHUNK=chunk, num_warps=1,
        )  # fmt: skip
        _lower_heads[(batch * heads,)](plan.mask64, plan.row_count, plan.row_index, heads, blocks, CHUNK=chunk)
        _lower_work[(batch * heads, triton.cdiv(blocks, RANK_ROWS))](
            plan.mask64, plan.kv_count, plan.row_count, plan.work, plan.work_count, heads, blocks, batch * heads,
            HEAD_ROWS=triton.next_power_of_2(batch * heads), ROWS=RANK_ROWS, CHUNK=min(chunk, 128),
        )  # fmt: skip
