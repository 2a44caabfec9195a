"""Launcher of ``lowering.cu``."""

from __future__ import annotations

import ctypes

from dit_accel.kernels._cuda.runtime import kernel
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols

THREADS = 256
WARPS = 8
BYTES_A_LANE = 16  # of a row's bits
COUNTED_ANEW = 16 * 1024  # bytes of a group's bits that every thread block of its lists may read again


def lower_into(symbols: SparseSymbols, plan: AttentionPlan, ranked_together: int) -> None:
    """``ranked_together``: rows that the work list sorts together, those of a head or of all heads."""
    heads, blocks, rows = plan.heads, plan.blocks, plan.work.numel()
    skip_bits = None if symbols.skip_bits is None else symbols.skip_bits.contiguous()
    codes = symbols.expanded_codes()
    codes_strides = (0, 0, 0) if codes is None else codes.stride()[:3]

    row_bytes = block_count(blocks, 8)
    lanes = min(1 << (block_count(row_bytes, BYTES_A_LANE) - 1).bit_length(), 32)
    chunk_rows = 32 if ranked_together <= 1024 else 256  # the fewer, the more threads share a row's comparisons
    list_blocks = rows // ranked_together * block_count(ranked_together, chunk_rows)
    tile_blocks = block_count(rows, WARPS)
    padded = block_count(ranked_together, 32) * 32
    launches = [(list_blocks, tile_blocks, lanes, 0)]
    if skip_bits is not None and ranked_together * row_bytes > COUNTED_ANEW:
        launches = [(0, tile_blocks, lanes, 0), (list_blocks, 0, 1, 1)]  # the second reads the first's kv_count
    for lists, tiles, lanes_a_row, counted in launches:
        kernel("lowering.cu", "lower", plan.mask64.device).launch(
            (lists + tiles,),
            THREADS,
            (
                symbols.cache_bits.contiguous(), skip_bits, codes, *map(ctypes.c_longlong, codes_strides),
                plan.mask64, plan.kv_count, plan.full_count, plan.kv_index,
                plan.row_count, plan.row_index, plan.work, plan.work_count,
                rows, heads, blocks, ranked_together, lists, chunk_rows, lanes_a_row, counted,
            ),
            shared_bytes=(padded * 4 + padded // 8) if lists else 0,
        )  # fmt: skip
