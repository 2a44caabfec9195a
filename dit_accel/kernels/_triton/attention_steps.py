"""Functions that the attention kernels share: loads of tiles, the tiles of a row, their masks, and the online softmax.

A row's list holds its FULL tiles, ascending, then its masked tiles, ascending. The end of the keys (of the sequence, or
``kv_len``) cuts at most one tile of each kind, so a row visits, in this order,

    whole FULL tiles, which need no mask | a FULL tile that is cut, at most one | masked tiles, one of which may be cut
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dit_accel.kernels.symbols import CAUSAL_TILE, FIRST_PARTIAL_TILE, FULL_TILE

LOWEST = tl.constexpr(-3.0e38)  # replaces -inf, because the difference of two -inf is NaN
LN_2 = tl.constexpr(0.6931471805599453)
FULL = tl.constexpr(FULL_TILE)
CAUSAL = tl.constexpr(CAUSAL_TILE)
FIRST_PARTIAL = tl.constexpr(FIRST_PARTIAL_TILE)


@triton.jit
def load_tile(
    tiles, base, batch, head, start, token_stride, valid_tokens,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    """Load ``[TOKENS, HEAD_DIM]`` of a head from token ``start`` on; IS_CUT: tokens from ``valid_tokens`` on read 0.

    A descriptor reads 0 only beyond the end of the sequence, regardless of ``valid_tokens``.
    """
    if BY_DESCRIPTOR:
        return tiles.load([batch, start, head, 0]).reshape([TOKENS, HEAD_DIM])
    token = tl.arange(0, TOKENS)[:, None]
    pointers = base + tl.cast(start, tl.int64) * token_stride + token * token_stride + tl.arange(0, HEAD_DIM)[None, :]
    if IS_CUT:
        return tl.load(pointers, token < valid_tokens, other=0.0)
    return tl.load(pointers)


def fits_descriptor(x: torch.Tensor) -> bool:
    """Return True if address and strides are multiples of 16 bytes, as the copy engine (TMA) requires."""
    steps = [step * x.element_size() for step, length in zip(x.stride()[:3], x.shape[:3], strict=True) if length > 1]
    return x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def tile_descriptor(x: torch.Tensor, tokens: int) -> TensorDescriptor:
    """Return a descriptor of tiles ``[1, tokens, 1, D]`` of ``[B, S, H, D]``."""
    head_dim = x.shape[-1]  # also replaces the stride of an axis of length 1, which may be any number
    strides = [stride if length > 1 else head_dim for stride, length in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, tokens, 1, head_dim])


@triton.jit
def visits_of_row(
    kv_count, full_count, key_blocks, row, blocks, key_end,
    BLOCK: tl.constexpr, LIST: tl.constexpr, HAS_KV_LEN: tl.constexpr, HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """Count the FULL tiles: all, uncut ones, and ones with valid keys; and count masked tiles with valid keys."""
    count = tl.load(kv_count + row)
    full = tl.load(full_count + row) if HAS_MASKS else count
    whole_blocks = key_end // BLOCK
    if HAS_KV_LEN:
        slot = tl.arange(0, LIST)
        listed = tl.load(key_blocks + slot, slot < count, other=blocks)
        has_key = listed * BLOCK < key_end
        whole = tl.sum((listed < whole_blocks).to(tl.int32) * (slot < full).to(tl.int32), 0)
        visible_full = tl.sum(has_key.to(tl.int32) * (slot < full).to(tl.int32), 0)
        visible_masked = tl.sum(has_key.to(tl.int32) * (slot >= full).to(tl.int32), 0)
    else:
        last = tl.load(key_blocks + full - 1, full > 0, other=0)
        whole = full - ((full > 0) & (last >= whole_blocks)).to(tl.int32)
        visible_full = full
        visible_masked = count - full
    return full, whole, visible_full, visible_masked


@triton.jit
def pairs_that_attend(
    code, pool, query_block, key_block, first_query, first_key,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask of a tile, or of a part of one, by its code, bool ``[QUERIES, KEYS]``; the part starts inside its blocks.

    Each query reads or computes 32-bit words for its keys. In the layout of a product's result a thread's keys differ
    by 1 and by multiples of 8. So ``key & 6`` is the same for all of them, and the thread shifts each word once by it;
    the rest of the key's number is known at compile time. A pair then costs one bit test and one selection.
    """
    query = first_query + tl.arange(0, QUERIES)
    key = tl.arange(0, KEYS)[None, :]
    line = (tl.maximum(code - FIRST_PARTIAL, 0).to(tl.int64) * BLOCK + query) * (BLOCK // 32) + first_key // 32
    pool_words = pool.to(tl.pointer_type(tl.int32)) + line
    words = tl.zeros([QUERIES, KEYS], tl.int32)
    for part in tl.static_range((KEYS + 31) // 32):
        partial = tl.load(pool_words + part, code >= FIRST_PARTIAL, other=-1) >> (first_key % 32)
        count = (query_block - key_block) * BLOCK + query - first_key - part * 32 + 1  # of the word's keys
        causal = tl.where(count < 32, (1 << tl.minimum(tl.maximum(count, 0), 31)) - 1, -1)
        word = tl.where(code == CAUSAL, causal, partial)
        words = tl.where(key // 32 == part, word[:, None], words)
    return (words >> (key & 6) & (1 << (key & 25))) != 0


@triton.jit
def softmax_step(scores, running_max, running_sum, scale_log2, MASKED: tl.constexpr):
    """One step of the online softmax in base 2: return probabilities, the factor for earlier sums, maximum, and sum.

    ``scores`` are unscaled products; with ``MASKED`` a query may have had no key yet (all -inf, sum 0).
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
    shift = tl.maximum(new_max, LOWEST) if MASKED else new_max
    probabilities = tl.math.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.math.exp2(running_max - shift)
    return probabilities, decay, new_max, running_sum * decay + tl.sum(probabilities, 1)


@triton.jit
def go_on_from(acc, running_max, running_sum, out_rows, lse_rows, query_valid, has_before, LOG2_E: tl.constexpr):
    """Merge a softmax over further keys with a row's earlier normalised output and log-sum-exp, if it has any.

    Pointers ``out_rows`` ``[QUERIES, HEAD_DIM]`` and ``lse_rows`` ``[QUERIES]`` are read and written. Without an
    earlier output (``has_before``) the memory may hold garbage.
    """
    before = tl.load(lse_rows, query_valid & has_before, other=float("-inf")) * LOG2_E
    new_max = tl.maximum(running_max, before)
    share, share_before = tl.math.exp2(running_max - new_max), tl.math.exp2(before - new_max)
    total = running_sum * share + share_before
    old = tl.load(out_rows, query_valid[:, None] & has_before, other=0.0).to(tl.float32)
    acc = acc * (share / total)[:, None] + old * (share_before / total)[:, None]
    tl.store(out_rows, acc.to(out_rows.dtype.element_ty), query_valid[:, None])
    tl.store(lse_rows, (new_max + tl.math.log2(total)) * LN_2, query_valid)


@triton.jit
def is_negligible(scores, running_max, query_valid, scale_log2, threshold_log2):
    """Return True if for every query the tile's best score is too far below the best so far (SpargeAttn, 3.4)."""
    best = tl.max(scores, 1) * scale_log2
    behind = best - tl.maximum(tl.maximum(running_max, best), LOWEST)  # -inf where the tile masks all of a query
    behind = tl.where(query_valid, behind, float("-inf"))
    return tl.max(behind, 0) < threshold_log2
