"""Softmax of a row's queries over the means of the blocks that it skips, in one pass."""

import triton
import triton.language as tl

from dit_accel.kernels._triton.attention_steps import go_on_from, softmax_step
from dit_accel.kernels._triton.launch import on_device, precision
from dit_accel.kernels.constants import LOG2_E


@triton.jit
def _add_tile_means(
    q, mean_k, mean_v, listed, kv_len, mask64, kv_count, out, lse,
    q_batch, q_token, q_head, out_batch, out_token, out_head, heads, group, blocks, tokens, scale_log2,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_KV_LEN: tl.constexpr, PRECISION: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = BLOCK // QUERIES
    row = tl.program_id(0) // PARTS  # (b * H + h) * Tq + i
    first_query = row % blocks * BLOCK + tl.program_id(0) % PARTS * QUERIES
    head = row // blocks % heads
    batch = row // blocks // heads
    computes = tl.load(mask64 + batch * blocks + row % blocks) >> head.to(tl.int64) & 1
    if (computes == 1) & (first_query < tokens):
        dim = tl.arange(0, HEAD_DIM)
        query_offset = tl.arange(0, QUERIES)
        query_valid = query_offset < tokens - first_query
        q_base = q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + first_query.to(tl.int64) * q_token
        query = tl.load(q_base + query_offset[:, None] * q_token + dim[None, :], query_valid[:, None], other=0.0)
        head_means = (batch * (heads // group) + head // group).to(tl.int64) * blocks * HEAD_DIM
        row_listed = listed + row.to(tl.int64) * blocks
        key_end = tl.minimum(tl.load(kv_len + batch), tokens) if HAS_KV_LEN else tokens
        running_max = tl.full([QUERIES], float("-inf"), tl.float32)
        running_sum = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
        for start in range(0, blocks, KEY_TILE):
            tile = start + tl.arange(0, KEY_TILE)
            rows = head_means + tile[:, None] * HEAD_DIM + dim[None, :]
            keys = tl.load(mean_k + rows, (tile < blocks)[:, None], other=0.0)
            key_count = tl.minimum(key_end - tile * BLOCK, BLOCK)
            takes_part = (tl.load(row_listed + tile, tile < blocks, other=1) == 0) & (key_count > 0)
            weight = tl.math.log2(tl.maximum(key_count, 1).to(tl.float32)) / scale_log2  # in units of unscaled scores
            tile_bias = tl.where(takes_part, weight, float("-inf"))
            scores = tl.dot(query, keys.T, input_precision=PRECISION) + tile_bias[None, :]
            probabilities, decay, running_max, running_sum = softmax_step(
                scores, running_max, running_sum, scale_log2, True
            )
            values = tl.load(mean_v + rows, (tile < blocks)[:, None], other=0.0)
            acc = tl.dot(probabilities.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
        if tl.max(running_max, 0) > float("-inf"):  # all queries have some mean, or none has
            out_base = out + batch.to(tl.int64) * out_batch + head.to(tl.int64) * out_head
            out_rows = out_base + (first_query + query_offset).to(tl.int64)[:, None] * out_token + dim[None, :]
            lse_rows = lse + (row // blocks).to(tl.int64) * tokens + first_query + query_offset
            has_tiles = tl.load(kv_count + row) > 0
            go_on_from(acc, running_max, running_sum, out_rows, lse_rows, query_valid, has_tiles, LOG2_E)


def add_tile_means_into(q, mean_k, mean_v, plan, scale, kv_len, listed, out, lse) -> None:
    queries = 64
    with on_device(q):
        _add_tile_means[(plan.work.numel() * (plan.block // queries),)](
            q, mean_k, mean_v, listed, kv_len, plan.mask64, plan.kv_count, out, lse,
            *q.stride()[:3], *out.stride()[:3],
            plan.heads, plan.heads // mean_k.shape[1], plan.blocks, plan.tokens, scale * LOG2_E,
            BLOCK=plan.block, QUERIES=queries, KEY_TILE=32, HEAD_DIM=q.shape[-1],
            HAS_KV_LEN=kv_len is not None, PRECISION=precision(q), LOG2_E=LOG2_E, num_warps=4,
        )  # fmt: skip
