"""Single keys gathered into tiles: persistent programs that continue the softmax over a row's tiles.

A program takes the rows with most keys first, from a counter that all programs share. For each row it

1. writes the positions of the set bits into its own list, which holds one row and stays in the L2 cache;
2. gathers the keys and values of the list, ``KEY_TILE`` at a time, by asynchronous copies of one row each
   (FG-Attn's gather-load), ``STAGES`` tiles ahead; positions are loaded one tile ahead of that;
3. continues the online softmax of ``attention_steps`` with them, from the row's output and log-sum-exp.
"""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.attention_steps import go_on_from, softmax_step
from dit_accel.kernels._triton.configs import config
from dit_accel.kernels._triton.launch import key_end_of, multiprocessors, on_device, precision
from dit_accel.kernels.constants import LOG2_E
from dit_accel.kernels.symbols import AttentionPlan

SHORT_POSITIONS = 1 << 16  # tokens up to which a position takes 2 bytes
BYTES = 512  # bytes of a row's bits that are decoded at a time


@triton.jit
def _load_bits(row_bits, byte, row_bytes, key_end):
    """Load bytes of a row's bits as int32, with 0 for keys from ``key_end`` on."""
    packed = tl.load(row_bits + byte, byte < row_bytes, other=0).to(tl.int32)
    return packed & ((1 << tl.minimum(tl.maximum(key_end - byte * 8, 0), 8)) - 1)


@triton.jit
def _set_bits(byte):
    """Number of set bits in each int32 from 0 to 255."""
    byte -= byte >> 1 & 0x55
    byte = (byte & 0x33) + (byte >> 2 & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@triton.jit
def _count_slices(bits, mask64, count, heads, blocks, tokens, row_bytes, BYTES: tl.constexpr):
    row = tl.program_id(0)  # (b * H + h) * Tq + i
    head = row // blocks % heads
    computes = tl.load(mask64 + row // blocks // heads * blocks + row % blocks) >> head.to(tl.int64) & 1
    total = tl.zeros([BYTES], tl.int32)
    for start in range(0, row_bytes * computes.to(tl.int32), BYTES):
        total += _set_bits(
            _load_bits(bits + row.to(tl.int64) * row_bytes, start + tl.arange(0, BYTES), row_bytes, tokens)
        )
    tl.store(count + row, tl.sum(total, 0))


@triton.jit
def _list_keys(positions, row_bits, row_bytes, key_end, BYTES: tl.constexpr):
    """Write the positions of a row's set bits, ascending, and return their number."""
    bit = tl.arange(0, 8)[None, :]
    listed = 0
    for start in range(0, tl.minimum(row_bytes, tl.cdiv(key_end, 8)), BYTES):
        byte = start + tl.arange(0, BYTES)
        packed = _load_bits(row_bits, byte, row_bytes, key_end)
        count = _set_bits(packed)
        earlier = _set_bits(packed[:, None] & ((1 << bit) - 1))  # bits of the byte below each: [bytes, 8]
        slot = (listed + tl.cumsum(count, 0) - count)[:, None] + earlier
        position = byte[:, None] * 8 + bit
        tl.store(positions + slot, position.to(positions.dtype.element_ty), (packed[:, None] >> bit & 1) == 1)
        listed += tl.sum(count, 0)
    return listed


@triton.jit
def _gather(base, position, token_stride, HEAD_DIM: tl.constexpr):
    """Gather the rows at these positions: ``[len(position), HEAD_DIM]``."""
    return tl.load(base + position.to(tl.int64)[:, None] * token_stride + tl.arange(0, HEAD_DIM)[None, :])


@triton.jit
def _add_slices(
    q, k, v, out, lse, bits, work, work_count, kv_count, kv_len, lists, next_item,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
    heads, group, blocks, tokens, row_bytes, scale_log2,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BYTES: tl.constexpr,
    HAS_KV_LEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = BLOCK // QUERIES
    positions = lists + tl.program_id(0).to(tl.int64) * row_bytes * 8
    query_offset = tl.arange(0, QUERIES)
    dim = tl.arange(0, HEAD_DIM)
    slot = tl.arange(0, KEY_TILE)
    items = tl.load(work_count) * PARTS
    item = tl.atomic_add(next_item, 1, sem="relaxed")
    while item < items:
        row = tl.load(work + item // PARTS)  # (b * H + h) * Tq + i
        head = row // blocks % heads
        batch = row // blocks // heads
        key_end = key_end_of(kv_len, batch, tokens, HAS_KV_LEN)
        tl.debug_barrier()  # no thread reads the previous row's list any more
        listed = _list_keys(positions, bits + row.to(tl.int64) * row_bytes, row_bytes, key_end, BYTES)
        tl.debug_barrier()  # all threads have written their part of this row's list
        if listed > 0:
            first_query = row % blocks * BLOCK + item % PARTS * QUERIES
            query_valid = query_offset < tokens - first_query
            q_base = q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + first_query.to(tl.int64) * q_token
            query = tl.load(q_base + query_offset[:, None] * q_token + dim[None, :], query_valid[:, None], other=0.0)
            k_base = k + batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
            v_base = v + batch.to(tl.int64) * v_batch + (head // group).to(tl.int64) * v_head
            running_max = tl.full([QUERIES], float("-inf"), tl.float32)
            running_sum = tl.zeros([QUERIES], tl.float32)
            acc = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
            padding = tl.load(positions)  # fills the last tile: a key of the row, so that it is finite if any is
            position = tl.load(positions + slot, slot < listed, other=padding)
            whole = listed // KEY_TILE
            for step in tl.range(0, whole, num_stages=STAGES):
                here = position
                ahead = (step + 1) * KEY_TILE + slot
                position = tl.load(positions + ahead, ahead < listed, other=padding)
                scores = tl.dot(query, _gather(k_base, here, k_token, HEAD_DIM).T, input_precision=PRECISION)
                probabilities, decay, running_max, running_sum = softmax_step(
                    scores, running_max, running_sum, scale_log2, False
                )
                values = _gather(v_base, here, v_token, HEAD_DIM)
                acc = tl.dot(probabilities.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
            if listed > whole * KEY_TILE:
                last = whole * KEY_TILE + slot
                position = tl.load(positions + last, last < listed, other=padding)
                scores = tl.dot(query, _gather(k_base, position, k_token, HEAD_DIM).T, input_precision=PRECISION)
                scores = tl.where((last < listed)[None, :], scores, float("-inf"))
                probabilities, decay, running_max, running_sum = softmax_step(
                    scores, running_max, running_sum, scale_log2, False
                )
                values = _gather(v_base, position, v_token, HEAD_DIM)
                acc = tl.dot(probabilities.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
            out_base = out + batch.to(tl.int64) * out_batch + head.to(tl.int64) * out_head
            out_rows = out_base + (first_query + query_offset).to(tl.int64)[:, None] * out_token + dim[None, :]
            lse_rows = lse + (row // blocks).to(tl.int64) * tokens + first_query + query_offset
            has_tiles = tl.load(kv_count + row) > 0
            go_on_from(acc, running_max, running_sum, out_rows, lse_rows, query_valid, has_tiles, LOG2_E)
        item = tl.atomic_add(next_item, 1, sem="relaxed")


def count_slices_into(plan: AttentionPlan) -> None:
    bits = plan.slices.bits
    with on_device(bits):
        _count_slices[(plan.work.numel(),)](
            bits.contiguous(), plan.mask64, plan.slices.count, plan.heads, plan.blocks, plan.tokens, bits.shape[-1],
            BYTES=BYTES, num_warps=1,
        )  # fmt: skip


def add_slices_into(q, k, v, plan, scale, kv_len, out, lse) -> None:
    sizes = config("single keys" if plan.block == 128 else "single keys, blocks of 64", q)
    programs = min(plan.work.numel() * (plan.block // sizes["QUERIES"]), multiprocessors(q) * (128 // plan.block))
    bits = plan.slices.bits.contiguous()
    row_bytes = bits.shape[-1]
    position_type = torch.uint16 if plan.tokens <= SHORT_POSITIONS else torch.int32
    lists = torch.empty(programs, row_bytes * 8, dtype=position_type, device=q.device)
    next_item = torch.zeros(1, dtype=torch.int32, device=q.device)
    with on_device(q):
        _add_slices[(programs,)](
            q, k, v, out, lse, bits, plan.slices.work, plan.slices.work_count, plan.kv_count, kv_len, lists, next_item,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            plan.heads, plan.heads // k.shape[2], plan.blocks, plan.tokens, row_bytes, scale * LOG2_E,
            BLOCK=plan.block, HEAD_DIM=q.shape[-1], BYTES=BYTES, HAS_KV_LEN=kv_len is not None,
            PRECISION=precision(q), LOG2_E=LOG2_E, **sizes,
        )  # fmt: skip
