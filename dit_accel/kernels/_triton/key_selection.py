"""Selection of keys in two launches, each with half of attention's products; scores are not stored.

1. Softmax as in attention, but without values: each query's largest score and sum of exponentials. If few queries would
   leave multiprocessors idle, the keys are divided among programs too, and the results are partial.
2. The same products transposed, keys by queries: the threads that hold a key find its largest excess over the queries'
   thresholds, and eight keys form a byte.
"""

import math

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.attention_steps import LOWEST, fits_descriptor, load_tile, softmax_step, tile_descriptor
from dit_accel.kernels._triton.configs import config
from dit_accel.kernels._triton.launch import key_end_of, on_device, precision
from dit_accel.kernels.backends import hopper_limit
from dit_accel.kernels.constants import BEST_SHARE, LOG2_E

PROGRAMS = 1024  # approximate number of programs up to which the keys are divided
MAX_SPLITS = 16


@triton.jit
def _queries_of_program(q, q_batch, q_token, q_head, heads, queries, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr):
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    first_query = tl.program_id(0) * QUERIES
    offset = tl.arange(0, QUERIES)
    valid = offset < queries - first_query
    base = q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + first_query.to(tl.int64) * q_token
    query = tl.load(base + offset[:, None] * q_token + tl.arange(0, HEAD_DIM)[None, :], valid[:, None], other=0.0)
    return batch, head, query, first_query + offset, valid


@triton.jit
def _tiles_of_program(kv_len, batch, tokens, KEY_TILE: tl.constexpr, HAS_KV_LEN: tl.constexpr):
    """Return the end of the keys, and the program's first tile, the end of its whole tiles, and the end of all."""
    key_end = key_end_of(kv_len, batch, tokens, HAS_KV_LEN)
    tiles = tl.cdiv(key_end, KEY_TILE)
    share = tl.cdiv(tiles, tl.num_programs(2))
    first = tl.minimum(tl.program_id(2) * share, tiles)
    stop = tl.minimum(first + share, tiles)
    return key_end, first, tl.maximum(tl.minimum(stop, key_end // KEY_TILE), first), stop


@triton.jit
def _sum_exponentials(
    q, k, maxima, sums, kv_len, k_tiles, q_batch, q_token, q_head, k_batch, k_token, k_head,
    heads, queries, tokens, scale_log2,
    QUERIES: tl.constexpr, KEY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_KV_LEN: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch, head, query, row, valid = _queries_of_program(q, q_batch, q_token, q_head, heads, queries, QUERIES, HEAD_DIM)
    key_end, first, whole, stop = _tiles_of_program(kv_len, batch, tokens, KEY_TILE, HAS_KV_LEN)
    k_base = k + batch.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    running_max = tl.full([QUERIES], float("-inf"), tl.float32)
    running_sum = tl.zeros([QUERIES], tl.float32)
    for tile in tl.range(first, whole, num_stages=STAGES):
        keys = load_tile(
            k_tiles, k_base, batch, head, tile * KEY_TILE, k_token, KEY_TILE, KEY_TILE, HEAD_DIM, BY_DESCRIPTOR, False
        )
        scores = tl.dot(query, keys.T, input_precision=PRECISION)  # [queries, key_tile]
        _, _, running_max, running_sum = softmax_step(scores, running_max, running_sum, scale_log2, False)
    if stop > whole:
        start = whole * KEY_TILE
        keys = load_tile(k_tiles, k_base, batch, head, start, k_token, key_end - start, KEY_TILE, HEAD_DIM, False, True)
        scores = tl.dot(query, keys.T, input_precision=PRECISION)
        scores = tl.where((start + tl.arange(0, KEY_TILE) < key_end)[None, :], scores, float("-inf"))
        _, _, running_max, running_sum = softmax_step(scores, running_max, running_sum, scale_log2, False)
    part = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * queries + row
    tl.store(maxima + part, running_max, valid)
    tl.store(sums + part, running_sum, valid)


@triton.jit
def _least_scores(maxima, sums, row, valid, queries, key_end, scale_log2, log2_limit, log2_best, QUERIES: tl.constexpr):
    """Lowest unscaled score with each query at which a key is selected, from the partial results of all programs."""
    maximum = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for split in range(tl.num_programs(2)):
        part = (split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * queries + row
        part_maximum = tl.load(maxima + part, valid, other=float("-inf"))
        new_maximum = tl.maximum(maximum, part_maximum)
        total = total * tl.math.exp2(maximum - new_maximum)
        total += tl.load(sums + part, valid, other=0.0) * tl.math.exp2(part_maximum - new_maximum)
        maximum = new_maximum
    least = maximum + tl.math.log2(total) + log2_limit - tl.math.log2(key_end.to(tl.float32))
    least = tl.minimum(least, maximum + log2_best)
    return tl.where(valid, least / scale_log2, float("inf"))


@triton.jit
def _store_keys(
    bits, excess, start, key_end, first_row, rows, row_bytes,
    QUERIES: tl.constexpr, KEY_TILE: tl.constexpr, SHARE_ROW: tl.constexpr,
):  # fmt: skip
    """Store a tile's bytes from the keys' excess ``[KEY_TILE, QUERIES]``, one row for all queries or one each."""
    valid = start + tl.arange(0, KEY_TILE) < key_end
    byte = tl.arange(0, KEY_TILE // 8)
    has_key = start + byte * 8 < key_end
    to = bits + start // 8 + byte
    if SHARE_ROW:
        stays = (valid & (tl.max(excess, 1) > 0.0)).to(tl.int32).reshape([KEY_TILE // 8, 8])
        tl.store(to + first_row * row_bytes, tl.sum(stays << tl.arange(0, 8)[None, :], 1).to(tl.uint8), has_key)
    else:
        stays = (valid[:, None] & (excess > 0.0)).to(tl.int32).reshape([KEY_TILE // 8, 8, QUERIES])
        packed = tl.sum(stays << tl.arange(0, 8)[None, :, None], 1).to(tl.uint8)
        row = first_row + tl.arange(0, QUERIES)
        tl.store(to[:, None] + row[None, :] * row_bytes, packed, has_key[:, None] & (row < rows)[None, :])


@triton.jit
def _select_keys(
    q, k, maxima, sums, bits, kv_len, k_tiles, q_batch, q_token, q_head, k_batch, k_token, k_head,
    heads, queries, tokens, rows, row_bytes, scale_log2, log2_limit, log2_best,
    QUERIES: tl.constexpr, KEY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, SHARE_ROW: tl.constexpr,
    HAS_KV_LEN: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch, head, query, row, valid = _queries_of_program(q, q_batch, q_token, q_head, heads, queries, QUERIES, HEAD_DIM)
    key_end, first, whole, stop = _tiles_of_program(kv_len, batch, tokens, KEY_TILE, HAS_KV_LEN)
    k_base = k + batch.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    if stop > first:
        least = _least_scores(maxima, sums, row, valid, queries, key_end, scale_log2, log2_limit, log2_best, QUERIES)
        first_row = tl.program_id(0).to(tl.int64) * (1 if SHARE_ROW else QUERIES)
        bits += tl.program_id(1).to(tl.int64) * rows * row_bytes
        for tile in tl.range(first, whole, num_stages=STAGES):
            start = tile * KEY_TILE
            keys = load_tile(
                k_tiles, k_base, batch, head, start, k_token, KEY_TILE, KEY_TILE, HEAD_DIM, BY_DESCRIPTOR, False
            )
            excess = tl.dot(keys, query.T, input_precision=PRECISION) - least[None, :]  # [key_tile, queries]
            _store_keys(bits, excess, start, key_end, first_row, rows, row_bytes, QUERIES, KEY_TILE, SHARE_ROW)
        if stop > whole:
            start = whole * KEY_TILE
            keys = load_tile(
                k_tiles, k_base, batch, head, start, k_token, key_end - start, KEY_TILE, HEAD_DIM, False, True
            )
            excess = tl.dot(keys, query.T, input_precision=PRECISION) - least[None, :]
            _store_keys(bits, excess, start, key_end, first_row, rows, row_bytes, QUERIES, KEY_TILE, SHARE_ROW)


def select_keys_into(bits, q, k, threshold, group, kv_len) -> None:
    batch, queries, heads, head_dim = q.shape
    by_descriptor = hopper_limit(q) is None and q.dtype != torch.float32 and fits_descriptor(k)
    by_query = config("key selection, sums", q)
    by_key = config("key selection, bits", q) | {"QUERIES": max(group, 64)}  # a group, or 64 queries of separate rows
    programs = triton.cdiv(queries, by_query["QUERIES"]) * batch * heads
    splits = min(max(PROGRAMS // programs, 1), MAX_SPLITS, triton.cdiv(k.shape[1], by_query["KEY_TILE"]))
    maxima, sums = torch.empty(2, splits, batch * heads, queries, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3])
    scale_log2 = head_dim**-0.5 * LOG2_E
    ends = {"HAS_KV_LEN": kv_len is not None, "BY_DESCRIPTOR": by_descriptor, "PRECISION": precision(q)}
    tiles = [tile_descriptor(k, sizes["KEY_TILE"]) if by_descriptor else None for sizes in (by_query, by_key)]
    with on_device(q):
        _sum_exponentials[(triton.cdiv(queries, by_query["QUERIES"]), batch * heads, splits)](
            q, k, maxima, sums, kv_len, tiles[0], *strides, heads, queries, k.shape[1], scale_log2,
            HEAD_DIM=head_dim, **ends, **by_query,
        )  # fmt: skip
        _select_keys[(triton.cdiv(queries, by_key["QUERIES"]), batch * heads, splits)](
            q, k, maxima, sums, bits, kv_len, tiles[1], *strides, heads, queries, k.shape[1],
            bits.shape[2], bits.shape[3], scale_log2, math.log2(threshold), math.log2(BEST_SHARE),
            SHARE_ROW=group > 1, HEAD_DIM=head_dim, **ends, **by_key,
        )  # fmt: skip
