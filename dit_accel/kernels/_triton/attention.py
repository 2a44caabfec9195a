"""Block-sparse attention: one program for each 64 (or 128) queries of a row that computes; online softmax in base 2.

A program reads ``work_count`` on the device and ends at once if its number is beyond it. The others loop over the key
blocks of their row in tiles of ``KEY_TILE`` tokens. With s = scale * log2(e), running maximum m and sum l:

    m' = max(m, s * max_j q k_j)      p_j = exp2(s * q k_j - m')      a = exp2(m - m')
    l  = a * l + sum_j p_j            acc = a * acc + sum_j p_j v_j

Without masks a row's tile that is cut by the end of the keys, at most one, follows in a second loop. With masks one
loop goes over all tiles, and whole FULL tiles skip the mask (see ``attention_steps``). Unused features are compiled
out. On Hopper the loop does not prefetch: three programs fit a multiprocessor (168 registers, 49 KiB of shared memory).
At head dimension 128 and 33K tokens they run at 551 TF on one H200, two programs with two stages at 544 TF.
"""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.attention_steps import (
    FULL,
    LN_2,
    fits_descriptor,
    is_negligible,
    load_tile,
    pairs_that_attend,
    softmax_step,
    tile_descriptor,
    visits_of_row,
)
from dit_accel.kernels._triton.configs import config
from dit_accel.kernels._triton.launch import key_end_of, launch, precision
from dit_accel.kernels.backends import hopper_limit
from dit_accel.kernels.constants import LOG2_E
from dit_accel.kernels.symbols import AttentionPlan, masks_of


@triton.jit
def _slot(visit, full, visible_full):
    """Position of a visit's tile in the row's list, which may have FULL tiles without valid keys before masked ones."""
    return visit + tl.where(visit < visible_full, 0, full - visible_full)


@triton.jit
def _add_values(
    acc, probabilities, tiles, base, batch, head, start, token_stride, valid_tokens,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, IS_CUT: tl.constexpr,
    HAS_KV_LEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if IS_CUT and HAS_KV_LEN and BY_DESCRIPTOR:
        if valid_tokens < TOKENS:  # values beyond kv_len may be NaN, and 0 * NaN is NaN: read 0 there
            values = load_tile(
                tiles, base, batch, head, start, token_stride, valid_tokens, TOKENS, HEAD_DIM, False, True
            )
            acc = tl.dot(probabilities.to(values.dtype), values, acc, input_precision=PRECISION)
        else:
            values = load_tile(
                tiles, base, batch, head, start, token_stride, valid_tokens, TOKENS, HEAD_DIM, True, False
            )
            acc = tl.dot(probabilities.to(values.dtype), values, acc, input_precision=PRECISION)
    else:
        values = load_tile(
            tiles, base, batch, head, start, token_stride, valid_tokens, TOKENS, HEAD_DIM, BY_DESCRIPTOR, IS_CUT
        )
        acc = tl.dot(probabilities.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _attention(
    q, k, v, out, lse, work, work_count, kv_count, full_count, kv_index, kv_len, codes, pool, k_tiles, v_tiles,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
    codes_batch, codes_head, heads, group, blocks, tokens, scale_log2, pv_threshold_log2,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, LIST: tl.constexpr,
    HAS_KV_LEN: tl.constexpr, HAS_MASKS: tl.constexpr, IS_RAGGED: tl.constexpr, HAS_PV_THRESHOLD: tl.constexpr,
    HAS_LSE: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = BLOCK // KEY_TILE
    PARTS: tl.constexpr = BLOCK // QUERIES
    HAS_END: tl.constexpr = HAS_KV_LEN or IS_RAGGED
    item = tl.program_id(0)
    row = tl.load(work + item // PARTS)  # (b * H + h) * Tq + i
    if item >= tl.load(work_count) * PARTS:
        return
    query_block = row % blocks
    head = row // blocks % heads
    batch = row // blocks // heads
    kv_head = head // group
    query_in_block = item % PARTS * QUERIES
    first_query = query_block * BLOCK + query_in_block
    query_offset = tl.arange(0, QUERIES)
    query_valid = query_offset < tokens - first_query
    dim = tl.arange(0, HEAD_DIM)
    q_base = q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + first_query.to(tl.int64) * q_token
    query = tl.load(q_base + query_offset[:, None] * q_token + dim[None, :], query_valid[:, None], other=0.0)
    k_base = k + batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head
    v_base = v + batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head

    key_blocks = kv_index + row.to(tl.int64) * blocks
    key_end = key_end_of(kv_len, batch, tokens, HAS_KV_LEN)
    if HAS_END or HAS_MASKS:
        full, whole, visible_full, visible_masked = visits_of_row(
            kv_count, full_count, key_blocks, row, blocks, key_end, BLOCK, LIST, HAS_KV_LEN, HAS_MASKS
        )
        visits = visible_full + visible_masked
    else:
        whole = tl.load(kv_count + row)
        visits = whole

    running_max = tl.full([QUERIES], float("-inf"), tl.float32)
    running_sum = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    steps = (visits if HAS_MASKS else whole) * TILES
    # The next key block is loaded one step ahead. Otherwise Triton passes it through shared memory, which costs two
    # barriers per step (33K tokens, tiles of 64 keys, three stages: 341 TF instead of 463 TF).
    slot = 0
    if HAS_MASKS:
        slot = _slot(0, full, visible_full)
    key_block = tl.load(key_blocks + slot, steps > 0, other=0)
    if HAS_MASKS:
        codes_of_row = codes + batch.to(tl.int64) * codes_batch + head * codes_head + query_block * blocks
        code = tl.load(codes_of_row + key_block)
    for step in tl.range(0, steps, num_stages=STAGES):
        this_block, key_in_block = key_block, step % TILES * KEY_TILE
        start = this_block * BLOCK + key_in_block
        valid_keys = key_end - start
        slot = (step + 1) // TILES
        if HAS_MASKS:
            slot = _slot(slot, full, visible_full)
        key_block = tl.load(key_blocks + slot, step + 1 < steps, other=0)
        keys = load_tile(
            k_tiles, k_base, batch, kv_head, start, k_token, valid_keys, KEY_TILE, HEAD_DIM, BY_DESCRIPTOR,
            HAS_MASKS and HAS_END,
        ).T  # fmt: skip
        scores = tl.dot(query, keys, input_precision=PRECISION)  # [queries, key_tile]
        if HAS_MASKS:
            this_code = code
            code = tl.load(codes_of_row + key_block)
            if (this_code != FULL) | (valid_keys < KEY_TILE):
                attends = pairs_that_attend(
                    this_code, pool, query_block, this_block, query_in_block, key_in_block, QUERIES, KEY_TILE, BLOCK
                )
                if HAS_END:
                    attends &= (tl.arange(0, KEY_TILE) < valid_keys)[None, :]
                scores = tl.where(attends, scores, float("-inf"))
        negligible = False
        if HAS_PV_THRESHOLD:
            negligible = (step + 1 < visits) & is_negligible(
                scores, running_max, query_valid, scale_log2, pv_threshold_log2
            )
        if not negligible:
            probabilities, decay, running_max, running_sum = softmax_step(
                scores, running_max, running_sum, scale_log2, HAS_MASKS
            )
            acc = _add_values(
                acc * decay[:, None], probabilities, v_tiles, v_base, batch, kv_head, start, v_token, valid_keys,
                KEY_TILE, HEAD_DIM, BY_DESCRIPTOR, HAS_MASKS and HAS_END, HAS_KV_LEN, PRECISION,
            )  # fmt: skip

    if HAS_END and not HAS_MASKS:  # at most one cut tile, whose last parts may have no key
        key_block = tl.load(key_blocks + whole, visits > whole, other=0)
        left = tl.where(visits > whole, key_end - key_block * BLOCK, 0)
        for step in tl.range(0, tl.cdiv(tl.minimum(left, BLOCK), KEY_TILE), num_stages=1):
            start = key_block * BLOCK + step * KEY_TILE
            valid_keys = key_end - start
            keys = load_tile(
                k_tiles, k_base, batch, kv_head, start, k_token, valid_keys, KEY_TILE, HEAD_DIM, BY_DESCRIPTOR, True
            ).T
            scores = tl.dot(query, keys, input_precision=PRECISION)
            scores = tl.where((tl.arange(0, KEY_TILE) < valid_keys)[None, :], scores, float("-inf"))
            probabilities, decay, running_max, running_sum = softmax_step(
                scores, running_max, running_sum, scale_log2, True
            )
            acc = _add_values(
                acc * decay[:, None], probabilities, v_tiles, v_base, batch, kv_head, start, v_token, valid_keys,
                KEY_TILE, HEAD_DIM, BY_DESCRIPTOR, True, HAS_KV_LEN, PRECISION,
            )  # fmt: skip

    # a query without keys has sum 0 and maximum -inf: output 0, lse -inf
    norm = 1.0 / tl.where(running_sum == 0.0, 1.0, running_sum)
    out_base = (
        out + batch.to(tl.int64) * out_batch + head.to(tl.int64) * out_head + first_query.to(tl.int64) * out_token
    )
    tl.store(
        out_base + query_offset[:, None] * out_token + dim[None, :], (acc * norm[:, None]).to(out.dtype.element_ty),
        query_valid[:, None],
    )  # fmt: skip
    if HAS_LSE:
        row_lse = (running_max + tl.math.log2(running_sum)) * LN_2
        tl.store(lse + (row // blocks).to(tl.int64) * tokens + first_query + query_offset, row_lse, query_valid)


def _kernel(q: torch.Tensor, plan: AttentionPlan, has_pv_threshold: bool) -> str:
    """Name of this variant in ``CONFIGS``."""
    if q.dtype == torch.float32:
        return "attention"
    masks = ", masks" if plan.masks is not None and not has_pv_threshold else ""
    heads = ", heads of 64" if masks and plan.block == 128 and q.shape[-1] <= 64 else ""
    blocks = ", blocks of 64" if plan.block == 64 else ""
    return f"attention{', pv_threshold' if has_pv_threshold else masks}{heads}{blocks}"


def attention_into(q, k, v, plan, scale, kv_len, pv_threshold, out, lse) -> None:
    is_hopper = hopper_limit(q) is None
    heads, blocks, tokens = plan.heads, plan.blocks, plan.tokens
    # a short call is launch-bound, and two descriptors would make its launch a third longer
    wants_descriptor = is_hopper and q.dtype != torch.float32 and (plan.masks is None or not plan.is_short)
    by_descriptor = wants_descriptor and fits_descriptor(k) and fits_descriptor(v)
    sizes = config(_kernel(q, plan, pv_threshold is not None), q, by_descriptor)
    codes, pool, codes_strides = masks_of(plan)
    tensors = (
        q, k, v, out, lse, plan.work, plan.work_count, plan.kv_count, plan.full_count, plan.kv_index,
        kv_len, codes, pool,
        tile_descriptor(k, sizes["KEY_TILE"]) if by_descriptor else None,
        tile_descriptor(v, sizes["KEY_TILE"]) if by_descriptor else None,
    )  # fmt: skip
    numbers = (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *codes_strides,
        heads, heads // k.shape[2], blocks, tokens, scale * LOG2_E, (pv_threshold or 0.0) * LOG2_E,
    )  # fmt: skip
    launch(
        _attention, plan.work.numel() * (plan.block // sizes["QUERIES"]), tensors, numbers,
        BLOCK=plan.block, HEAD_DIM=q.shape[-1], LIST=1 if kv_len is None else 1 << (blocks - 1).bit_length(),
        HAS_KV_LEN=kv_len is not None, HAS_MASKS=codes is not None, IS_RAGGED=tokens % plan.block != 0,
        HAS_PV_THRESHOLD=pv_threshold is not None, HAS_LSE=lse is not None, BY_DESCRIPTOR=by_descriptor,
        PRECISION=precision(q), **sizes,
    )  # fmt: skip
