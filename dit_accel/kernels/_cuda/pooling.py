"""Launchers of ``pooling.cu``."""

from __future__ import annotations

import math

import torch

from dit_accel.kernels._cuda.runtime import kernel
from dit_accel.kernels._cuda.tensor_map import tensor_map_limit
from dit_accel.kernels.constants import SMALLEST_SQUARED_NORM
from dit_accel.kernels.layout import block_count

HEAD_DIMS = (32, 64, 128)
MAX_BLOCKS = 1280  # 16 rows of scores in the 99 KiB of shared memory that every GPU since sm80 has
ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
STATISTICS_WARPS = 4
MAP_WARPS = 8
QUERIES = 16


def limit(q: torch.Tensor, k: torch.Tensor, block: int) -> str | None:
    """What keeps these kernels from the arguments, or None."""
    head_dim, blocks = q.shape[-1], block_count(q.shape[1], block)
    if head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, got {head_dim}"
    if blocks > MAX_BLOCKS:
        return f"a map has at most {MAX_BLOCKS} blocks, got {blocks}"
    return tensor_map_limit("q", q) or tensor_map_limit("k", k)  # loads of 16 bytes ask for what the copy engine does


def pooled_map_into(
    mean: torch.Tensor,
    similarity: torch.Tensor,
    probabilities: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    block: int,
    kv_len: torch.Tensor | None,
) -> None:
    """Fills ``mean`` ``[2, B, H, T, D]`` and ``similarity`` ``[2, B, H, T]`` (of q, then k) and ``probabilities``."""
    batch, tokens, heads, head_dim = q.shape
    blocks = probabilities.shape[-1]
    defines = (("HEAD_DIM", head_dim), ("ELEMENT", ELEMENTS[q.dtype]), ("BLOCK", block))
    vector = 16 // q.element_size()
    strides = (stride // vector for x in (q, k) for stride in x.stride()[:3])
    kernel("pooling.cu", "block_statistics", q.device, defines).launch(
        (heads, blocks, 2 * batch),
        32 * STATISTICS_WARPS,
        (q, k, kv_len, mean, similarity, *strides, tokens, batch, SMALLEST_SQUARED_NORM),
    )
    row = block_count(blocks, 32) * 32 + 8
    kernel("pooling.cu", "pooled_probabilities", q.device, defines).launch(
        (block_count(blocks, QUERIES), batch * heads),
        32 * MAP_WARPS,
        (mean, probabilities, kv_len, tokens, heads, blocks, math.log2(math.e) * head_dim**-0.5),
        shared_bytes=4 * (head_dim + QUERIES * row),
    )
