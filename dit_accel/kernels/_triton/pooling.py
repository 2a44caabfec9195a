"""Block statistics: one program a (batch, head, block) reads its tokens once and keeps their sum and their unit sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device
from dit_accel.kernels.pooling import SMALLEST_SQUARED_NORM
from dit_accel.layout import block_count


@triton.jit
def _block_statistics(
    x, lengths, mean, similarity, x_batch, x_token, x_head, heads, blocks, smallest_squared_norm,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # (b * H + h) * T + i
    first_token = row % blocks * BLOCK
    head = row // blocks % heads
    batch = row // blocks // heads
    slot = tl.arange(0, BLOCK)
    dim = tl.arange(0, HEAD_DIM)
    count = tl.minimum(tl.maximum(tl.load(lengths + batch) - first_token, 0), BLOCK)
    pointers = x + batch * x_batch + head * x_head + (first_token + slot)[:, None] * x_token + dim[None, :]
    tokens = tl.load(pointers, (slot < count)[:, None], other=0.0).to(tl.float32)  # [block, head_dim]
    squared_norm = tl.maximum(tl.sum(tokens * tokens, 1), smallest_squared_norm)
    unit_sum = tl.sum(tokens * tl.rsqrt(squared_norm)[:, None], 0)  # [head_dim]
    divisor = tl.maximum(count, 1).to(tl.float32)
    tl.store(mean + row * HEAD_DIM + dim, tl.sum(tokens, 0) / divisor)
    tl.store(similarity + row, tl.sum(unit_sum * unit_sum, 0) / (divisor * divisor))


def block_statistics(x: torch.Tensor, block: int, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean ``[B, H, T, D]`` and mean pairwise cosine ``[B, H, T]`` of each block's valid tokens, float32."""
    batch, tokens, heads, head_dim = x.shape
    blocks = block_count(tokens, block)
    mean = torch.empty(batch, heads, blocks, head_dim, dtype=torch.float32, device=x.device)
    similarity = torch.empty(batch, heads, blocks, dtype=torch.float32, device=x.device)
    with on_device(x):
        _block_statistics[(similarity.numel(),)](
            x, lengths, mean, similarity, *x.stride()[:3], heads, blocks, SMALLEST_SQUARED_NORM,
            BLOCK=block, HEAD_DIM=head_dim,
        )  # fmt: skip
    return mean, similarity
