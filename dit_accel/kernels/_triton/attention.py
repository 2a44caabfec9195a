"""Block-sparse attention: a persistent grid over the rows that compute, online softmax in base 2.

Each program strides through ``work[:work_count]``, whose length it reads on the device. A row holds one query block;
it goes through its key blocks in tiles of ``KEY_TILE`` tokens. With s = scale * log2(e), running maximum m and sum l:

    m' = max(m, s * max_j q k_j)      p_j = exp2(s * q k_j - m')      a = exp2(m - m')
    l  = a * l + sum_j p_j            acc = a * acc + sum_j p_j v_j

Key blocks are listed ascending, so at most one of them is cut by the end of the sequence (or by ``kv_len``), and it
stands behind all whole ones: whole blocks need no mask.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import is_hopper_or_later, multiprocessors, on_device
from dit_accel.symbols import AttentionPlan

PROGRAMS_PER_MULTIPROCESSOR = 2


@triton.jit
def _attend_tile(
    query, acc, running_max, running_sum, k_tile, v_tile, k_token, v_token, valid_keys, scale_log2,
    KEY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys and values, of which the first ``valid_keys`` count where MASKED."""
    key = tl.arange(0, KEY_TILE)
    dim = tl.arange(0, HEAD_DIM)
    k_pointers = k_tile + key[None, :] * k_token + dim[:, None]  # [head_dim, key_tile]
    v_pointers = v_tile + key[:, None] * v_token + dim[None, :]  # [key_tile, head_dim]
    if MASKED:
        keys = tl.load(k_pointers, (key < valid_keys)[None, :], other=0.0)
        values = tl.load(v_pointers, (key < valid_keys)[:, None], other=0.0)
    else:
        keys = tl.load(k_pointers)
        values = tl.load(v_pointers)
    scores = tl.dot(query, keys, input_precision=PRECISION)  # [block, key_tile]
    if MASKED:
        scores = tl.where((key < valid_keys)[None, :], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
    probabilities = tl.math.exp2(scores * scale_log2 - new_max[:, None])
    decay = tl.math.exp2(running_max - new_max)
    running_sum = running_sum * decay + tl.sum(probabilities, 1)
    acc = tl.dot(probabilities.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_max, running_sum


@triton.jit
def _attention(
    q, k, v, out, lse, work, work_count, kv_count, kv_index, kv_len,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
    heads, group, blocks, tokens, scale_log2,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_TILE: tl.constexpr, LIST: tl.constexpr,
    HAS_KV_LEN: tl.constexpr, HAS_LSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = BLOCK // KEY_TILE
    dim = tl.arange(0, HEAD_DIM)
    for item in range(tl.program_id(0), tl.load(work_count), tl.num_programs(0)):
        row = tl.load(work + item).to(tl.int64)  # (b * H + h) * Tq + i
        head = row // blocks % heads
        batch = row // blocks // heads
        token = (row % blocks * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
        token_valid = (token < tokens)[:, None]
        token_wide = token.to(tl.int64)[:, None]
        query = tl.load(
            q + batch * q_batch + head * q_head + token_wide * q_token + dim[None, :], token_valid, other=0.0
        )  # [block, head_dim]
        k_base = k + batch * k_batch + head // group * k_head
        v_base = v + batch * v_batch + head // group * v_head

        count = tl.load(kv_count + row)
        key_blocks = kv_index + row * blocks
        key_end = tokens
        if HAS_KV_LEN:
            key_end = tl.minimum(tl.maximum(tl.load(kv_len + batch), 0), tokens)
            slot = tl.arange(0, LIST)
            listed = tl.load(key_blocks + slot, slot < count, other=blocks)
            whole = tl.sum((listed < key_end // BLOCK).to(tl.int32), 0)
        else:
            last = tl.load(key_blocks + count - 1, count > 0, other=0)
            whole = count - ((count > 0) & (last >= key_end // BLOCK)).to(tl.int32)

        running_max = tl.full([BLOCK], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
        for tile in tl.range(0, whole * TILES, num_stages=STAGES):
            start = tl.load(key_blocks + tile // TILES).to(tl.int64) * BLOCK + tile % TILES * KEY_TILE
            acc, running_max, running_sum = _attend_tile(
                query, acc, running_max, running_sum, k_base + start * k_token, v_base + start * v_token,
                k_token, v_token, KEY_TILE, scale_log2, KEY_TILE, HEAD_DIM, False, PRECISION,
            )  # fmt: skip
        if whole < count:
            ragged = tl.load(key_blocks + whole).to(tl.int64) * BLOCK
            for start in range(0, tl.minimum(key_end - ragged, BLOCK), KEY_TILE):
                acc, running_max, running_sum = _attend_tile(
                    query, acc, running_max, running_sum,
                    k_base + (ragged + start) * k_token, v_base + (ragged + start) * v_token,
                    k_token, v_token, key_end - ragged - start, scale_log2, KEY_TILE, HEAD_DIM, True, PRECISION,
                )  # fmt: skip

        # a row without keys has sum 0 and maximum -inf: output 0, lse -inf
        result = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
        out_pointers = out + batch * out_batch + head * out_head + token_wide * out_token + dim[None, :]
        tl.store(out_pointers, result.to(out.dtype.element_ty), token_valid)
        if HAS_LSE:
            row_lse = (running_max + tl.math.log2(running_sum)) * 0.6931471805599453  # ln 2
            tl.store(lse + row // blocks * tokens + token, row_lse, token < tokens)


def _config(q: torch.Tensor, block: int) -> dict[str, int]:
    """Tile and pipeline sizes that fit the device's shared memory: query + stages * (keys + values)."""
    head_dim = q.shape[-1]
    if q.dtype == torch.float32:
        return {"KEY_TILE": 32, "STAGES": 1, "num_warps": 8}
    if is_hopper_or_later(q):
        return {"KEY_TILE": block, "STAGES": 2 if block * head_dim == 128 * 128 else 3, "num_warps": block // 16}
    return {"KEY_TILE": 64, "STAGES": 2, "num_warps": block // 16}


def attention_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_len: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    programs = min(plan.work.numel(), PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(q))
    with on_device(q):
        _attention[(programs,)](
            q, k, v, out, lse, plan.work, plan.work_count, plan.kv_count, plan.kv_index, kv_len,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            plan.heads, plan.heads // k.shape[2], plan.blocks, plan.tokens, scale * math.log2(math.e),
            BLOCK=plan.block, HEAD_DIM=q.shape[-1], LIST=triton.next_power_of_2(plan.blocks),
            HAS_KV_LEN=kv_len is not None, HAS_LSE=lse is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **_config(q, plan.block),
        )  # fmt: skip
