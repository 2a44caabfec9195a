"""Lowering in two launches, without any count on the host.

1. One program per row decodes its bits into ``kv_count`` and ``kv_index`` (and, for head 0, the row-block's
   ``mask64``).
2. One program per chunk of rows finds their places in the work list. A row's rank is the number of rows in its group
   (its head, or all heads) that are longer, or as long and earlier; rows of earlier heads come before the group.
"""

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device, set_bits
from dit_accel.kernels.symbols import FULL_TILE, AttentionPlan, SparseSymbols

RANK_ROWS = 32  # rows that a program ranks among all rows of their group


@triton.jit
def _load_tiles(row_bits, row_codes, tile, blocks, HAS_SKIP: tl.constexpr, HAS_MASKS: tl.constexpr, FULL: tl.constexpr):
    """Return for a row's tiles 1 or 0: whether they compute, and whether they compute and are full."""
    keep = (tile < blocks).to(tl.int32)
    if HAS_SKIP:
        keep &= tl.load(row_bits + tile // 8, tile < blocks, other=0).to(tl.int32) >> tile % 8
    full = keep
    if HAS_MASKS:
        full &= (tl.load(row_codes + tile, tile < blocks, other=FULL) == FULL).to(tl.int32)
    return keep, full


@triton.jit
def _lower_rows(
    cache_bits, skip_bits, codes, mask64, kv_count, full_count, kv_index,
    codes_batch, codes_head, codes_row, heads, blocks, head_bytes, row_bytes,
    HAS_SKIP: tl.constexpr, HAS_MASKS: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr,
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
    stop = blocks * (word >> head.to(tl.int64) & 1).to(tl.int32)  # a reused row has no tile

    row_bits = skip_bits + row * row_bytes if HAS_SKIP else skip_bits
    row_codes = codes + batch * codes_batch + head * codes_head + row_block * codes_row if HAS_MASKS else codes
    full_tiles = 0
    if HAS_MASKS:
        for start in range(0, stop, CHUNK):
            tile = start + tl.arange(0, CHUNK)
            _, full = _load_tiles(row_bits, row_codes, tile, blocks, HAS_SKIP, HAS_MASKS, FULL)
            full_tiles += tl.sum(full, 0)
        tl.store(full_count + row, full_tiles)
    before = 0  # full tiles in earlier chunks, or all tiles if none is masked
    masked_before = full_tiles
    for start in range(0, stop, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        keep, full = _load_tiles(row_bits, row_codes, tile, blocks, HAS_SKIP, HAS_MASKS, FULL)
        tl.store(kv_index + row * blocks + before + tl.cumsum(full, 0) - 1, tile, full == 1)
        before += tl.sum(full, 0)
        if HAS_MASKS:
            masked = keep - full
            tl.store(kv_index + row * blocks + masked_before + tl.cumsum(masked, 0) - 1, tile, masked == 1)
            masked_before += tl.sum(masked, 0)
    tl.store(kv_count + row, masked_before if HAS_MASKS else before)


@triton.jit
def _computes(mask64, row, heads, blocks, valid):
    """Return 1 if the row ``(b * H + h) * Tq + i`` computes, else 0."""
    word = tl.load(mask64 + row // blocks // heads * blocks + row % blocks, valid, other=0)
    return (word >> (row // blocks % heads).to(tl.int64) & 1).to(tl.int32)


@triton.jit
def _lower_lists(
    mask64, kv_count, work, work_count, heads, blocks, group_rows, words,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * group_rows  # the group's first row
    stop = first + group_rows
    row = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    computes = _computes(mask64, row, heads, blocks, row < stop)
    length = tl.load(kv_count + row, row < stop, other=0)

    first_batch = first // blocks // heads
    earlier_heads = (tl.full([1], 1, tl.int64) << (first // blocks % heads).to(tl.int64)) - 1
    first_slot = 0
    for start in range(0, (first_batch + 1) * blocks, CHUNK):
        index = start + tl.arange(0, CHUNK)
        word = tl.load(mask64 + index, index < (first_batch + 1) * blocks, other=0)
        first_slot += tl.sum(set_bits(tl.where(index < first_batch * blocks, word, word & earlier_heads)), 0)

    rank = tl.zeros([ROWS], tl.int32)
    group_count = 0
    for start in range(first, stop, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_computes = _computes(mask64, other, heads, blocks, other < stop)
        other_length = tl.where(other_computes == 1, tl.load(kv_count + other, other < stop, other=0), -1)
        is_before = (other_length[None, :] > length[:, None]) | (
            (other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None])
        )
        rank += tl.sum(is_before.to(tl.int32), 1)
        group_count += tl.sum(other_computes, 0)
    tl.store(work + first_slot + rank, row, computes == 1)
    if (stop == words * heads) & (tl.program_id(1) == 0):
        tl.store(work_count, first_slot + group_count)


def lower_into(symbols: SparseSymbols, plan: AttentionPlan, ranked_together: int) -> None:
    """Fill a plan; ``ranked_together``: number of rows that the work list sorts together, of a head or of all heads."""
    batch, heads, blocks = plan.batch, plan.heads, plan.blocks
    rows = batch * heads * blocks
    chunk = min(triton.next_power_of_2(blocks), 1024)
    cache_bits = symbols.cache_bits.contiguous()
    skip_bits = None if symbols.skip_bits is None else symbols.skip_bits.contiguous()
    codes, codes_strides = None, (0, 0, 0)
    if symbols.masks is not None:
        codes = symbols.masks.codes.expand(batch, heads, -1, -1)  # broadcast axes are not copied
        codes = codes if codes.stride(3) == 1 else codes.contiguous()
        codes_strides = codes.stride()[:3]
    with on_device(cache_bits):
        _lower_rows[(rows,)](
            cache_bits, skip_bits, codes, plan.mask64, plan.kv_count, plan.full_count, plan.kv_index, *codes_strides,
            heads, blocks, cache_bits.shape[-1], triton.cdiv(blocks, 8),
            HAS_SKIP=skip_bits is not None, HAS_MASKS=codes is not None, FULL=FULL_TILE, CHUNK=chunk, num_warps=1,
        )  # fmt: skip
        _lower_lists[(rows // ranked_together, triton.cdiv(ranked_together, RANK_ROWS))](
            plan.mask64, plan.kv_count, plan.work, plan.work_count, heads, blocks, ranked_together, batch * blocks,
            ROWS=RANK_ROWS, CHUNK=128,
        )  # fmt: skip
