"""Pooled map in two launches.

1. One program per (side, batch, block, head) reads its tokens once and computes their mean and the length of the sum of
   their unit vectors. Neighbouring programs read neighbouring heads, which are adjacent in memory.
2. One program per (batch, head) and chunk of query blocks writes scores against all key blocks into the map, then, with
   the row's maximum and sum, their softmax in place. The first block's mean, which contains the part that all keys
   share, is subtracted from their means. The float32 products are made of three TF32 products.
"""

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import key_end_of, on_device
from dit_accel.kernels.constants import LOG2_E, SMALLEST_SQUARED_NORM

STATISTICS_WARPS = 2
CHUNK = 16  # tokens per step of a program
QUERIES = 16  # query blocks per program
KEYS = 64  # key blocks that a program scores at a time


@triton.jit
def _block_statistics(
    q, k, kv_len, mean, similarity, q_batch, q_token, q_head, k_batch, k_token, k_head,
    tokens, heads, blocks, smallest_squared_norm,
    HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # (b * T + i) * H + h
    head = program % heads
    first_token = program // heads % blocks * BLOCK
    batch = program // heads // blocks
    dim = tl.arange(0, HEAD_DIM)
    length = tokens
    stride = q_token
    if tl.program_id(1) == 0:
        x = q + batch * q_batch + head * q_head
    else:
        x = k + batch * k_batch + head * k_head
        stride = k_token
        length = key_end_of(kv_len, batch, tokens, HAS_LENGTHS)
    x += first_token * stride
    count = tl.minimum(tl.maximum(length - first_token, 0), BLOCK)
    total = tl.zeros([CHUNK, HEAD_DIM], tl.float32)  # token t of each chunk
    unit_total = tl.zeros([CHUNK, HEAD_DIM], tl.float32)
    directed = tl.zeros([CHUNK], tl.float32)  # tokens that are not 0
    for start in tl.static_range(0, BLOCK, CHUNK):
        slot = start + tl.arange(0, CHUNK)[:, None]
        token = tl.load(x + slot * stride + dim[None, :], slot < count, other=0.0).to(tl.float32)
        squared_norm = tl.sum(token * token, 1)
        has_direction = squared_norm > smallest_squared_norm
        scale = tl.where(has_direction, tl.rsqrt(tl.maximum(squared_norm, smallest_squared_norm)), 0.0)
        total += token
        unit_total += token * scale[:, None]
        directed += has_direction.to(tl.float32)
    unit_sum = tl.sum(unit_total, 0)  # [head_dim]
    divisor = tl.maximum(count, 1).to(tl.float32)
    directions = tl.sum(directed, 0)
    cosine = tl.sum(unit_sum * unit_sum, 0) / tl.maximum(directions * directions, 1.0)
    sides = tl.num_programs(0).to(tl.int64) * tl.program_id(1)
    row = sides + (batch * heads + head) * blocks + program // heads % blocks  # of [2, B, H, T]
    tl.store(mean + row * HEAD_DIM + dim, tl.sum(total, 0) / divisor)
    tl.store(similarity + row, tl.where(directions > 0, cosine, 1.0))


@triton.jit
def _probabilities(
    mean, probabilities, kv_len, tokens, heads, blocks, scale,
    HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head_row = tl.program_id(1).to(tl.int64)  # b * H + h
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    dim = tl.arange(0, HEAD_DIM)
    q_mean = mean + head_row * blocks * HEAD_DIM
    k_mean = q_mean + tl.num_programs(1).to(tl.int64) * blocks * HEAD_DIM
    q = tl.load(q_mean + query[:, None] * HEAD_DIM + dim[None, :], (query < blocks)[:, None], other=0.0) * scale
    shared = tl.load(k_mean + dim)
    valid_blocks = tl.cdiv(key_end_of(kv_len, head_row // heads, tokens, HAS_LENGTHS), BLOCK)

    row = probabilities + (head_row * blocks + query)[:, None] * blocks
    running_max = tl.full([QUERIES], -float("inf"), tl.float32)
    running_sum = tl.zeros([QUERIES], tl.float32)
    for start in range(0, valid_blocks, KEYS):
        key = start + tl.arange(0, KEYS)
        k = tl.load(k_mean + key[:, None] * HEAD_DIM + dim[None, :], (key < valid_blocks)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k - shared[None, :]), input_precision="tf32x3")  # in units of log 2
        scores = tl.where((key < valid_blocks)[None, :], scores, -float("inf"))
        tl.store(row + key[None, :], scores, (query < blocks)[:, None] & (key < blocks)[None, :])
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        running_sum = running_sum * tl.exp2(running_max - new_max) + tl.sum(tl.exp2(scores - new_max[:, None]), 1)
        running_max = new_max
    tl.debug_barrier()  # because other threads of the program read the scores
    for start in range(0, blocks, KEYS):
        key = start + tl.arange(0, KEYS)
        stored = (query < blocks)[:, None] & (key < valid_blocks)[None, :]
        scores = tl.load(row + key[None, :], stored, other=-float("inf"))
        share = tl.where(stored, tl.exp2(scores - running_max[:, None]) / running_sum[:, None], 0.0)
        tl.store(row + key[None, :], share, (query < blocks)[:, None] & (key < blocks)[None, :])


def pooled_map_into(mean, similarity, probabilities, q, k, block, kv_len) -> None:
    """Fill ``mean`` ``[2, B, H, T, D]`` and ``similarity`` ``[2, B, H, T]`` (of q, then k) and ``probabilities``."""
    batch, tokens, heads, head_dim = q.shape
    blocks = probabilities.shape[-1]
    with on_device(q):
        _block_statistics[(batch * blocks * heads, 2)](
            q, k, kv_len, mean, similarity, *q.stride()[:3], *k.stride()[:3], tokens, heads, blocks,
            SMALLEST_SQUARED_NORM, HAS_LENGTHS=kv_len is not None, BLOCK=block, HEAD_DIM=head_dim,
            CHUNK=CHUNK, num_warps=STATISTICS_WARPS,
        )  # fmt: skip
        _probabilities[(triton.cdiv(blocks, QUERIES), batch * heads)](
            mean, probabilities, kv_len, tokens, heads, blocks, LOG2_E * head_dim**-0.5,
            HAS_LENGTHS=kv_len is not None, BLOCK=block, HEAD_DIM=head_dim, QUERIES=QUERIES, KEYS=KEYS,
        )  # fmt: skip
