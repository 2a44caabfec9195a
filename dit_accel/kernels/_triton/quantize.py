"""Eight-bit queries, keys and values for attention, by the formulas in ``dit_accel/kernels/attention/quantize.py``.

First the kernels sum each block per channel (q and k over a quarter of the tokens, v over all). Then one program per
key head computes means, factors and the list of exact channels from the sums. Then q, k and v are quantised.

All are padded to whole blocks. Exact channel 15 of a key is 0, or -inf if the key is ignored. A query has 1 there, so
the scores of such keys are -inf without a mask in the attention kernels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dit_accel.kernels import constants
from dit_accel.kernels._triton.launch import key_end_of, on_device
from dit_accel.kernels.symbols import AttentionPlan

SLOTS = 16  # the exact channels and the one that masks
EXACT_CHANNELS = tl.constexpr(constants.EXACT_CHANNELS)
SAMPLING = tl.constexpr(constants.SAMPLING)
INT8_MAX = tl.constexpr(constants.INT8_MAX)
FP8_MAX = tl.constexpr(constants.FP8_MAX)
FP16_SAFE = tl.constexpr(constants.FP16_SAFE)
SMALLEST_SCALE = tl.constexpr(constants.SMALLEST_SCALE)
LARGEST_FACTOR = tl.constexpr(constants.LARGEST_FACTOR)
LOG2_E = tl.constexpr(1.4426950408889634)
CHUNK, CHUNK_WARPS = 128, 16  # blocks that a head's program sums at once; it computes little and waits for memory


@dataclass(frozen=True)
class Quantized:
    """Inputs of the attention kernels; P = tokens padded to whole blocks, T blocks. Queries of reused rows are garbage.

    Exact channels are in units of the scale. Without lse ``shift`` is None, without float8 the last two fields are.
    """

    queries: torch.Tensor  # int8 [B, H, P, D]
    exact_queries: torch.Tensor  # float16 [B, H, P, 16], the exact channels and 1
    query_scale: torch.Tensor  # float32 [B, H, P], times the scale of the scores and log2(e)
    shift: torch.Tensor | None  # float32 [B, H, P], missing in the scores, in units of the log-sum-exp
    keys: torch.Tensor  # int8 [B, H_kv, P, D]
    exact_keys: torch.Tensor  # float16 [B, H_kv, P, 16], the exact channels and the mask
    key_scale: torch.Tensor  # float32 [B, H_kv, T]
    values: torch.Tensor | None  # e4m3 [B, H_kv, D, P], each 16 keys in the order of operand_order
    value_scale: torch.Tensor | None  # float32 [B, H_kv, 2, D], of each channel, and the mean to add at the end


class ValueMatrix(NamedTuple):
    """Values as a matrix of tiles; a head begins at row ``b * first[0] + h * first[1]``, column ``h * first[2]``."""

    values: torch.Tensor  # e4m3 with a row for each channel of each head, or of v's dtype with a row for each token
    shape: list[int]
    strides: list[int]
    first: tuple[int, int, int]


@triton.jit
def operand_order(position):
    """Index among 16 keys of the key at a position of a float8 operand, so that scores can stay in their registers.

    A thread holds columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16 scores, but rows 4 t to 4 t + 3 of an 8-bit operand.
    """
    return (position & ~15) + (position >> 1 & 1) * 8 + (position >> 2 & 3) * 2 + (position & 1)


@triton.jit
def _sums_of_blocks(
    x, kv_count, kv_len, sums, counts, x_batch, x_token, x_head, heads, blocks, tokens,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, OF_QUERIES: tl.constexpr, HAS_KV_LEN: tl.constexpr,
):  # fmt: skip
    """Count a block's valid sampled tokens; sum them per channel, and their squares around the mean."""
    row = tl.program_id(0).to(tl.int64)  # (b * H + h) * T + i
    head = row // blocks % heads
    batch = row // blocks // heads
    group = (row % blocks * (BLOCK // SAMPLING)).to(tl.int32) + tl.arange(0, BLOCK // SAMPLING)
    token = group * SAMPLING + ((group ^ group >> 2) & (SAMPLING - 1))
    end = key_end_of(kv_len, batch, tokens, HAS_KV_LEN)
    if OF_QUERIES:
        end = tl.where(tl.load(kv_count + row) > 0, end, 0)
    valid = token < end
    dim = tl.arange(0, HEAD_DIM)
    pointers = x + batch * x_batch + head * x_head + token.to(tl.int64)[:, None] * x_token + dim[None, :]
    values = tl.load(pointers, valid[:, None], other=0.0).to(tl.float32)  # [block / 4, head_dim]
    count = tl.sum(valid.to(tl.float32), 0)
    total = tl.sum(values, 0)
    centred = tl.where(valid[:, None], values - (total / tl.maximum(count, 1.0))[None, :], 0.0)
    tl.store(counts + row, count)
    tl.store(sums + row * 2 * HEAD_DIM + dim, total)
    tl.store(sums + (row * 2 + 1) * HEAD_DIM + dim, tl.sum(centred * centred, 0))


@triton.jit
def _ranges_of_blocks(
    v, kv_len, ranges, v_batch, v_token, v_head, heads, blocks, tokens,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_KV_LEN: tl.constexpr,
):  # fmt: skip
    """Sum, minimum and maximum of a block's valid values per channel."""
    row = tl.program_id(0).to(tl.int64)  # (b * H_kv + h) * T + i
    head = row // blocks % heads
    batch = row // blocks // heads
    token = (row % blocks * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    valid = (token < key_end_of(kv_len, batch, tokens, HAS_KV_LEN))[:, None]
    dim = tl.arange(0, HEAD_DIM)
    pointers = v + batch * v_batch + head * v_head + token.to(tl.int64)[:, None] * v_token + dim[None, :]
    values = tl.load(pointers, valid, other=0.0).to(tl.float32)
    of_row = ranges + row * 3 * HEAD_DIM + dim
    tl.store(of_row, tl.sum(values, 0))
    tl.store(of_row + HEAD_DIM, tl.min(tl.where(valid, values, float("inf")), 0))
    tl.store(of_row + 2 * HEAD_DIM, tl.max(tl.where(valid, values, float("-inf")), 0))


@triton.jit
def _moments(sums, counts, first, blocks, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr):
    """Count, mean and squares around the mean ``[head_dim]`` of ``blocks`` blocks from block ``first`` on."""
    dim = tl.arange(0, HEAD_DIM)
    count = 0.0
    total = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        listed = block < blocks
        count += tl.sum(tl.load(counts + first + block, listed, other=0.0), 0)
        total += tl.sum(tl.load(sums + ((first + block) * 2)[:, None] * HEAD_DIM + dim, listed[:, None], other=0.0), 0)
    mean = total / tl.maximum(count, 1.0)
    squares = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        listed = block < blocks
        of_block = tl.load(counts + first + block, listed, other=0.0)[:, None]
        pointers = sums + ((first + block) * 2)[:, None] * HEAD_DIM + dim
        distance = tl.load(pointers, listed[:, None], other=0.0) / tl.maximum(of_block, 1.0) - mean[None, :]
        inside = tl.load(pointers + HEAD_DIM, listed[:, None], other=0.0)
        squares += tl.sum(inside + of_block * distance * distance, 0)
    return count, mean, squares


@triton.jit
def _prepare(
    q_sums, q_counts, k_sums, k_counts, ranges, kv_len, smoothing, channels, value_scale,
    heads, kv_heads, blocks, tokens,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr, HAS_VALUES: tl.constexpr,
    HAS_KV_LEN: tl.constexpr,
):  # fmt: skip
    """Compute for a key head the mean of its keys, factors, exact channels, and scale and mean of its values."""
    head = tl.program_id(0).to(tl.int64)  # b * H_kv + h
    group = heads // kv_heads
    dim = tl.arange(0, HEAD_DIM)
    k_count, k_mean, k_squares = _moments(k_sums, k_counts, head * blocks, blocks, HEAD_DIM, CHUNK)
    q_count, q_mean, q_squares = _moments(
        q_sums, q_counts, head * group * blocks, blocks * group, HEAD_DIM, CHUNK
    )  # query heads b * H + h * group + 0 .. group are adjacent
    q_square = q_squares / tl.maximum(q_count, 1.0) + q_mean * q_mean
    k_square = k_squares / tl.maximum(k_count, 1.0)
    alive = (q_square > 0.0) & (k_square > 0.0)
    level = tl.sqrt(tl.sqrt(tl.where(alive, k_square, 1.0) / tl.where(alive, q_square, 1.0)))
    factor = tl.minimum(tl.maximum(level, 1.0 / LARGEST_FACTOR), LARGEST_FACTOR)
    weight = q_square * k_square
    # each channel's rank, then each rank's channel: two reductions instead of 15 for a search
    ahead = (weight[:, None] > weight[None, :]) | ((weight[:, None] == weight[None, :]) & (dim[:, None] < dim[None, :]))
    rank = tl.sum(ahead.to(tl.int32), 0)
    slot = tl.arange(0, SLOTS)
    channel = tl.sum(tl.where(rank[:, None] == slot[None, :], dim[:, None], 0), 0)
    tl.store(channels + head * SLOTS + slot, channel)
    of_head = smoothing + head * 3 * HEAD_DIM + dim
    tl.store(of_head, k_mean)
    tl.store(of_head + HEAD_DIM, factor)
    tl.store(of_head + 2 * HEAD_DIM, (rank >= EXACT_CHANNELS).to(tl.float32))

    if HAS_VALUES:
        total = tl.zeros([HEAD_DIM], tl.float32)
        smallest = tl.full([HEAD_DIM], float("inf"), tl.float32)
        largest = tl.full([HEAD_DIM], float("-inf"), tl.float32)
        for start in range(0, blocks, CHUNK):
            block = start + tl.arange(0, CHUNK)
            listed = (block < blocks)[:, None]
            pointers = ranges + ((head * blocks + block) * 3)[:, None] * HEAD_DIM + dim
            total += tl.sum(tl.load(pointers, listed, other=0.0), 0)
            smallest = tl.minimum(smallest, tl.min(tl.load(pointers + HEAD_DIM, listed, other=float("inf")), 0))
            largest = tl.maximum(largest, tl.max(tl.load(pointers + 2 * HEAD_DIM, listed, other=float("-inf")), 0))
        mean = total / tl.maximum(key_end_of(kv_len, head // kv_heads, tokens, HAS_KV_LEN), 1).to(tl.float32)
        scale = tl.maximum(tl.maximum(largest - mean, mean - smallest) / FP8_MAX, SMALLEST_SCALE)
        tl.store(value_scale + head * 2 * HEAD_DIM + dim, scale)
        tl.store(value_scale + (head * 2 + 1) * HEAD_DIM + dim, mean)


@triton.jit
def _int8(x):
    """Nearest integer, ties to even: adding 1.5 * 2^23 leaves it in the low bits, 4 times as fast as a conversion."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _exact_channels(tokens, channel, HEAD_DIM: tl.constexpr):
    """Select columns ``channel [16]`` of ``tokens [block, head_dim]`` exactly, by a product with ones and zeros.

    Loading them again would spread a warp over rows in the whole kernel: 174 loads per thread instead of 61.
    """
    chosen = (tl.arange(0, HEAD_DIM)[:, None] == channel[None, :]).to(tokens.dtype)
    return tl.dot(tokens, chosen, input_precision="ieee")


@triton.jit
def _quantize_queries(
    q, work, work_count, smoothing, channels, queries, exact, scales, shifts,
    q_batch, q_token, q_head, heads, kv_heads, blocks, tokens, scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """Quantise q; ``smoothing`` float32 ``[B, H_kv, 3, D]``: mean of k, factor f, and 1 for an int8 channel, else 0."""
    if tl.program_id(0) < tl.load(work_count):
        row = tl.load(work + tl.program_id(0)).to(tl.int64)  # (b * H + h) * T + i
        head = row // blocks % heads
        batch = row // blocks // heads
        token = (row % blocks * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
        valid = (token < tokens)[:, None]
        dim = tl.arange(0, HEAD_DIM)
        slot = tl.arange(0, SLOTS)
        kv_head = batch * kv_heads + head // (heads // kv_heads)
        of_head = smoothing + kv_head * 3 * HEAD_DIM
        of_token = q + batch * q_batch + head * q_head + token.to(tl.int64)[:, None] * q_token
        loaded = tl.load(of_token + dim[None, :], valid, other=0.0)  # [block, head_dim]
        query = loaded.to(tl.float32)
        channel = tl.load(channels + kv_head * SLOTS + slot)
        in_int8 = tl.load(of_head + 2 * HEAD_DIM + dim) * tl.load(of_head + HEAD_DIM + dim)
        smooth = query * in_int8[None, :]
        large = _exact_channels(loaded, channel, HEAD_DIM)  # [block, 16]
        large = tl.where(slot < EXACT_CHANNELS, large * tl.load(of_head + HEAD_DIM + channel)[None, :], 0.0)

        largest = tl.maximum(tl.max(tl.abs(smooth), 1) / INT8_MAX, tl.max(tl.abs(large), 1) / FP16_SAFE)
        unit = tl.maximum(largest, SMALLEST_SCALE)
        inverse = (1.0 / unit)[:, None]
        place = row * BLOCK + tl.arange(0, BLOCK)
        tl.store(scales + place, unit * (scale * LOG2_E))
        tl.store(queries + place[:, None] * HEAD_DIM + dim, _int8(smooth * inverse))
        large = tl.where(slot < EXACT_CHANNELS, large * inverse, 1.0)
        tl.store(exact + place[:, None] * SLOTS + slot, large.to(tl.float16))
        if HAS_SHIFT:
            tl.store(shifts + place, tl.sum(query * tl.load(of_head + dim)[None, :], 1) * scale)


@triton.jit
def _quantize_keys(
    k, kv_len, smoothing, channels, keys, exact, scales, k_batch, k_token, k_head, kv_heads, blocks, tokens,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr, HAS_KV_LEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # (b * H_kv + h) * T + i
    head = row // blocks
    batch = head // kv_heads
    token = (row % blocks * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    valid = (token < key_end_of(kv_len, batch, tokens, HAS_KV_LEN))[:, None]
    dim = tl.arange(0, HEAD_DIM)
    slot = tl.arange(0, SLOTS)
    of_head = smoothing + head * 3 * HEAD_DIM
    of_token = k + batch * k_batch + head % kv_heads * k_head + token.to(tl.int64)[:, None] * k_token
    channel = tl.load(channels + head * SLOTS + slot)
    in_int8 = tl.load(of_head + 2 * HEAD_DIM + dim) / tl.load(of_head + HEAD_DIM + dim)
    loaded = tl.load(of_token + dim[None, :], valid, other=0.0)  # [block, head_dim]
    smooth = tl.where(valid, (loaded.to(tl.float32) - tl.load(of_head + dim)[None, :]) * in_int8[None, :], 0.0)
    large = _exact_channels(loaded, channel, HEAD_DIM) - tl.load(of_head + channel)[None, :]  # [block, 16]
    large = tl.where(valid & (slot < EXACT_CHANNELS), large / tl.load(of_head + HEAD_DIM + channel), 0.0)

    largest = tl.maximum(tl.max(tl.abs(smooth)) / INT8_MAX, tl.max(tl.abs(large)) / FP16_SAFE)
    scale = tl.maximum(largest, SMALLEST_SCALE)
    inverse = 1.0 / scale
    large = tl.where(valid | (slot < EXACT_CHANNELS), large * inverse, float("-inf"))
    place = row * BLOCK + tl.arange(0, BLOCK)[:, None]
    tl.store(scales + row, scale)
    tl.store(keys + place * HEAD_DIM + dim, _int8(smooth * inverse))
    tl.store(exact + place * SLOTS + slot, large.to(tl.float16))


@triton.jit
def _quantize_values(
    v, kv_len, value_scale, values, rests, v_batch, v_token, v_head, kv_heads, blocks, tokens,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_KV_LEN: tl.constexpr,
):  # fmt: skip
    """Quantise v, and store in ``rests`` the sum of the block's rounded values per channel, 0 without rounding."""
    row = tl.program_id(0).to(tl.int64)  # (b * H_kv + h) * T + i
    head = row // blocks
    batch = head // kv_heads
    position = tl.arange(0, BLOCK)
    token = (row % blocks * BLOCK).to(tl.int32) + operand_order(position)
    valid = (token < key_end_of(kv_len, batch, tokens, HAS_KV_LEN))[:, None]
    dim = tl.arange(0, HEAD_DIM)
    pointers = v + batch * v_batch + head % kv_heads * v_head + token.to(tl.int64)[:, None] * v_token + dim[None, :]
    scale = tl.load(value_scale + head * 2 * HEAD_DIM + dim)
    mean = tl.load(value_scale + (head * 2 + 1) * HEAD_DIM + dim)
    centred = (tl.load(pointers, valid, other=0.0).to(tl.float32) - mean[None, :]) * (1.0 / scale)[None, :]
    rounded = tl.trans(tl.where(valid, centred, 0.0).to(values.dtype.element_ty))  # [head_dim, block]
    place = (head * HEAD_DIM + dim)[:, None] * (blocks * BLOCK) + row % blocks * BLOCK + position[None, :]
    tl.store(values + place, rounded)
    tl.store(rests + row * HEAD_DIM + dim, tl.sum(rounded.to(tl.float32), 1))


@triton.jit
def _center_rounded(
    rests, kv_len, value_scale, kv_heads, blocks, tokens,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, HAS_KV_LEN: tl.constexpr,
):  # fmt: skip
    """Subtract the mean of the rounded values from the mean that is added at the end, which corrects rounding."""
    head = tl.program_id(0).to(tl.int64)  # b * H_kv + h
    dim = tl.arange(0, HEAD_DIM)
    total = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        pointers = rests + (head * blocks + block)[:, None] * HEAD_DIM + dim[None, :]
        total += tl.sum(tl.load(pointers, (block < blocks)[:, None], other=0.0), 0)
    count = tl.maximum(key_end_of(kv_len, head // kv_heads, tokens, HAS_KV_LEN), 1).to(tl.float32)
    scale = value_scale + head * 2 * HEAD_DIM + dim
    tl.store(scale + HEAD_DIM, tl.load(scale + HEAD_DIM) - tl.load(scale) * total / count)


def quantize(q, k, v, plan, scale, kv_len, qk_dtype, has_lse) -> Quantized:
    """Quantise ``attention``'s arguments, already checked; q is only read in rows that compute."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads, blocks, block = k.shape[2], plan.blocks, plan.block
    padded = blocks * block
    has_values = qk_dtype == "int8+fp8"

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=q.device)

    q_sums, q_counts = empty(heads, blocks, 2, head_dim), empty(heads, blocks)
    k_sums, k_counts = empty(kv_heads, blocks, 2, head_dim), empty(kv_heads, blocks)
    ranges = empty(kv_heads, blocks, 3, head_dim) if has_values else None
    rests = empty(kv_heads, blocks, head_dim) if has_values else None
    smoothing, channels = empty(kv_heads, 3, head_dim), empty(kv_heads, SLOTS, dtype=torch.int32)
    result = Quantized(
        queries=empty(heads, padded, head_dim, dtype=torch.int8),
        exact_queries=empty(heads, padded, SLOTS, dtype=torch.float16),
        query_scale=empty(heads, padded),
        shift=empty(heads, padded) if has_lse else None,
        keys=empty(kv_heads, padded, head_dim, dtype=torch.int8),
        exact_keys=empty(kv_heads, padded, SLOTS, dtype=torch.float16),
        key_scale=empty(kv_heads, blocks),
        values=empty(kv_heads, head_dim, padded, dtype=torch.float8_e4m3fn) if has_values else None,
        value_scale=empty(kv_heads, 2, head_dim) if has_values else None,
    )
    tile = {"BLOCK": block, "HEAD_DIM": head_dim}
    ends = {"HAS_KV_LEN": kv_len is not None}
    of_query, of_key = (batch * heads * blocks,), (batch * kv_heads * blocks,)
    with on_device(q):
        _sums_of_blocks[of_query](
            q, plan.kv_count, None, q_sums, q_counts, *q.stride()[:3], heads, blocks, tokens,
            OF_QUERIES=True, HAS_KV_LEN=False, **tile,
        )  # fmt: skip
        _sums_of_blocks[of_key](
            k, None, kv_len, k_sums, k_counts, *k.stride()[:3], kv_heads, blocks, tokens,
            OF_QUERIES=False, **tile, **ends,
        )  # fmt: skip
        if has_values:
            _ranges_of_blocks[of_key](v, kv_len, ranges, *v.stride()[:3], kv_heads, blocks, tokens, **tile, **ends)
        _prepare[(batch * kv_heads,)](
            q_sums, q_counts, k_sums, k_counts, ranges, kv_len, smoothing, channels, result.value_scale,
            heads, kv_heads, blocks, tokens,
            HEAD_DIM=head_dim, CHUNK=CHUNK, SLOTS=SLOTS, HAS_VALUES=has_values, num_warps=CHUNK_WARPS, **ends,
        )  # fmt: skip
        _quantize_queries[of_query](
            q, plan.work, plan.work_count, smoothing, channels,
            result.queries, result.exact_queries, result.query_scale, result.shift,
            *q.stride()[:3], heads, kv_heads, blocks, tokens, scale,
            SLOTS=SLOTS, HAS_SHIFT=has_lse, num_warps=8, **tile,
        )  # fmt: skip
        _quantize_keys[of_key](
            k, kv_len, smoothing, channels, result.keys, result.exact_keys, result.key_scale,
            *k.stride()[:3], kv_heads, blocks, tokens, SLOTS=SLOTS, num_warps=8, **tile, **ends,
        )  # fmt: skip
        if has_values:
            _quantize_values[of_key](
                v, kv_len, result.value_scale, result.values, rests, *v.stride()[:3], kv_heads, blocks, tokens,
                num_warps=8, **tile, **ends,
            )  # fmt: skip
            _center_rounded[(batch * kv_heads,)](
                rests, kv_len, result.value_scale, kv_heads, blocks, tokens,
                HEAD_DIM=head_dim, CHUNK=CHUNK, num_warps=CHUNK_WARPS, **ends,
            )  # fmt: skip
    return result


def copy_values(v: torch.Tensor, plan: AttentionPlan, kv_len: torch.Tensor | None) -> torch.Tensor:
    """``[B, S, H_kv, D]`` -> contiguous ``[B, H_kv, P, D]`` with zeros for ignored keys."""
    batch, tokens, kv_heads, head_dim = v.shape
    values = v.new_zeros(batch, kv_heads, plan.blocks * plan.block, head_dim)
    values[:, :, :tokens] = v.transpose(1, 2)
    if kv_len is not None:
        values.masked_fill_((torch.arange(values.shape[2], device=v.device) >= kv_len[:, None])[:, None, :, None], 0)
    return values
