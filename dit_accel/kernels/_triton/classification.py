"""Classification: two order statistics of each row, found bit by bit, and the bits of the tiles above them.

Probabilities are not negative, so their bit patterns sort like the numbers. The largest pattern that at least m tiles
reach is found from the top bit down. All tiles above it and the earliest tiles equal to it are the m highest.
"""

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device
from dit_accel.kernels._triton.packing import store_bits
from dit_accel.kernels.constants import SHARE_BITS

ELEMENTS = 2048  # elements of the map per program, or one row
REGISTERS = 64  # per thread, so that a multiprocessor is fully occupied: each warp waits for one sum after another


@triton.jit
def _thresholds(pattern, first_wanted, second_wanted):
    """int32 [rows, tiles] -> [rows] twice: the largest pattern that the wanted numbers of tiles of the row reach.

    Shares are below 2, so bit 30 is clear. Both counts of a step share a word and are summed at once.
    """
    first = tl.zeros([pattern.shape[0]], tl.int32)
    second = first
    for step in range(30):
        first_candidate = first | 1 << (29 - step)
        second_candidate = second | 1 << (29 - step)
        reach = (pattern >= first_candidate[:, None]).to(tl.int32)
        reach += (pattern >= second_candidate[:, None]).to(tl.int32) << 16
        counts = tl.sum(reach, 1)
        first = tl.where((counts & 0xFFFF) >= first_wanted, first_candidate, first)
        second = tl.where((counts >> 16) >= second_wanted, second_candidate, second)
    return first, second


@triton.jit
def _are_among_highest(pattern, threshold, wanted):
    """bool [rows, tiles]: the ``wanted`` highest of each row; among those equal to the threshold the earlier ones."""
    is_above = pattern > threshold[:, None]
    is_equal = (pattern == threshold[:, None]).to(tl.int32)
    left = wanted - tl.sum(is_above.to(tl.int32), 1)
    place = tl.zeros_like(is_equal)
    if tl.max(tl.sum(is_equal, 1) - left, 0) > 0:  # seldom: the scan takes as long as all else
        place = tl.cumsum(is_equal, 1)
    return is_above | ((is_equal == 1) & (place <= left[:, None]))


@triton.jit
def _share_of(count, units, BITS: tl.constexpr):
    return ((count.to(tl.int64) * units + (1 << BITS - 1)) >> BITS).to(tl.int32)


@triton.jit
def _classify_tiles(
    probabilities, valid_blocks, skip_bits, linear_bits, rows, head_rows, blocks, row_bytes,
    critical_units, negligible_units, first_always, stop_always,
    HAS_LENGTHS: tl.constexpr, HAS_CRITICAL: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [rows, 1]
    tile = tl.arange(0, TILES)[None, :]
    is_valid = (row < rows) & (tile < blocks)
    if HAS_LENGTHS:
        is_valid &= tile < tl.load(valid_blocks + row // head_rows, row < rows, other=0)
    is_always = (tile >= first_always) & (tile < stop_always)
    is_candidate = is_valid & (is_always == 0)
    count = tl.sum(is_candidate.to(tl.int32), 1)  # [rows]
    critical = _share_of(count, critical_units, BITS)
    if HAS_CRITICAL:
        critical = tl.minimum(tl.maximum(critical, 1), count)
    negligible = tl.minimum(_share_of(count, negligible_units, BITS), count - critical)

    share = tl.load(probabilities + row * blocks + tile, is_candidate, other=0.0)
    pattern = tl.where(is_candidate, share.to(tl.int32, bitcast=True), -1)
    lowest_critical, lowest_kept = _thresholds(pattern, critical, count - negligible)
    is_critical = _are_among_highest(pattern, lowest_critical, critical)
    is_marginal = _are_among_highest(pattern, lowest_kept, count - negligible) & (is_critical == 0)
    row_block = row % blocks
    is_whole = is_valid & (is_always | ((row_block >= first_always) & (row_block < stop_always)))
    store_bits(skip_bits, is_critical | is_whole, row, rows, row_bytes, ROWS, TILES)
    store_bits(linear_bits, is_marginal & (is_whole == 0), row, rows, row_bytes, ROWS, TILES)


def classify_tiles_into(
    skip_bits, linear_bits, probabilities, critical_units, negligible_units, first_always, stop_always, valid_blocks
) -> None:
    batch, heads, blocks, row_bytes = skip_bits.shape
    rows, tiles = batch * heads * blocks, max(triton.next_power_of_2(blocks), 8)
    rows_a_program = max(ELEMENTS // tiles, 1)
    with on_device(probabilities):
        _classify_tiles[(triton.cdiv(rows, rows_a_program),)](
            probabilities, valid_blocks, skip_bits, linear_bits, rows, heads * blocks, blocks, row_bytes,
            critical_units, negligible_units, first_always, stop_always,
            HAS_LENGTHS=valid_blocks is not None, HAS_CRITICAL=critical_units > 0, BITS=SHARE_BITS,
            ROWS=rows_a_program, TILES=tiles, num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
