"""The pooled attention map that policies score (FlashOmni, section 3.3; SpargeAttn, section 3.2).

The mean of its valid tokens represents each block, ``P = softmax(q_mean k_mean^T / sqrt(D))``. The mean represents a
block badly if its tokens point in different directions. The block's similarity, the mean pairwise cosine
``|sum_i x_i / |x_i||^2 / n^2``, measures this. Tokens of zeros have no direction and count neither in the sum nor in n.
A block of only zeros, which its mean represents exactly, has similarity 1.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.constants import SMALLEST_SQUARED_NORM
from dit_accel.kernels.custom_ops import custom_op
from dit_accel.kernels.layout import block_count


@dataclass(frozen=True)
class PooledMap:
    """Block-level attention map; T blocks, H heads; all float32."""

    probabilities: torch.Tensor  # [B, H, T, T]; each row sums to 1, and key blocks without a valid token have 0
    q_similarity: torch.Tensor  # [B, H, T], mean pairwise cosine of the block's non-zero queries; 0 to 1
    k_similarity: torch.Tensor  # [B, H, T], of keys; 1 if a block has no valid key


def _empty(q: torch.Tensor, block: int, **_) -> PooledMap:
    batch, tokens, heads, _ = q.shape
    blocks = block_count(tokens, block)
    shapes = (batch, heads, blocks, blocks), (batch, heads, blocks), (batch, heads, blocks)
    return PooledMap(*(q.new_empty(shape, dtype=torch.float32) for shape in shapes))


@custom_op(_empty)
def pooled_map(
    q: torch.Tensor, k: torch.Tensor, block: int, *, kv_len: torch.Tensor | None = None, backend: str = "auto"
) -> PooledMap:
    """Pool queries and keys by block. Forward only: no gradient flows.

    The mean over the sample's valid keys is subtracted from the means of key blocks. This does not change the softmax
    but keeps its exponents small. "triton" subtracts the first block's mean, which needs no second pass and also
    removes the part that all keys share. Similarities are computed from the original tokens.

    Args:
        q, k: ``[B, S, H, D]``, float16, bfloat16 or float32; any strides, the last being 1.
        block: tokens in a block, 64 or 128.
        kv_len: int32 ``[B]``, valid keys of each sample; None = all. All queries are valid.
    """
    checks.require_floats("q", q, ("B", "S", "H", "D"))
    checks.require_like("q", q, tuple(q.shape), k=k)
    checks.require_block(block)
    checks.require_typed("q", q, (q.shape[0],), torch.int32, kv_len=kv_len)
    batch, tokens, heads, head_dim = q.shape
    if resolve_backend(backend, q, {"triton": checks.triton_limit(head_dim)}) == "reference":
        q_len = torch.full((batch,), tokens, dtype=torch.int32, device=q.device)
        k_len = q_len if kv_len is None else kv_len.clamp(0, tokens)
        q_mean, q_similarity = _block_statistics(q, block, q_len)
        k_mean, k_similarity = _block_statistics(k, block, k_len)
        valid = valid_tokens(k_len, k_mean.shape[2], block)[:, None, :, None]  # [B, 1, T, 1]
        sequence_mean = (k_mean * valid).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)
        scores = q_mean @ (k_mean - sequence_mean).transpose(-1, -2) * q_mean.shape[-1] ** -0.5
        scores = scores.masked_fill(valid.transpose(-1, -2) == 0, -torch.inf)
        probabilities = scores.softmax(-1).nan_to_num(0.0)  # a sample without a valid key has no distribution
        return PooledMap(probabilities, q_similarity, k_similarity)
    from dit_accel.kernels._triton.pooling import pooled_map_into

    blocks = block_count(tokens, block)
    mean = torch.empty(2, batch, heads, blocks, head_dim, dtype=torch.float32, device=q.device)  # of q, of k
    similarity = torch.empty(2, batch, heads, blocks, dtype=torch.float32, device=q.device)
    probabilities = torch.empty(batch, heads, blocks, blocks, dtype=torch.float32, device=q.device)
    lengths = None if kv_len is None else kv_len.contiguous()  # kernels read it by address
    pooled_map_into(mean, similarity, probabilities, q, k, block, lengths)
    return PooledMap(probabilities, *similarity)


def block_means(x: torch.Tensor, block: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Mean of each block's tokens, in ``dtype`` or x's, by float32 sums: ``[B, S, H, D]`` -> ``[B, T, H, D]``."""
    whole = x.shape[1] // block
    parts = [x[:, : whole * block].unflatten(1, (whole, block)), x[:, None, whole * block :]]
    return torch.cat([part.mean(2, dtype=torch.float32).to(dtype or x.dtype) for part in parts if part.numel()], 1)


def _block_statistics(x: torch.Tensor, block: int, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean ``[B, H, T, D]`` and mean pairwise cosine ``[B, H, T]`` of each block's valid tokens, float32."""
    tokens = x.shape[1]
    blocks = block_count(tokens, block)
    padded = F.pad(x.float(), (0, 0, 0, 0, 0, blocks * block - tokens))
    is_valid = torch.arange(blocks * block, device=x.device) < lengths[:, None]
    padded = torch.where(is_valid[..., None, None], padded, 0.0)  # where, not a product: padding may hold NaN
    squared_norm = padded.square().sum(-1, keepdim=True)
    directed = squared_norm > SMALLEST_SQUARED_NORM
    unit = torch.where(directed, padded * squared_norm.rsqrt(), 0.0)
    count = valid_tokens(lengths, blocks, block).clamp(min=1)[:, None]  # [B, 1, T]
    total, unit_total, directions = (
        y.unflatten(1, (blocks, block)).sum(2).transpose(1, 2) for y in (padded, unit, directed[..., 0])
    )
    similarity = torch.where(directions > 0, unit_total.square().sum(-1) / directions.square(), 1.0)
    return total / count[..., None], similarity


def valid_tokens(lengths: torch.Tensor, blocks: int, block: int) -> torch.Tensor:
    """Count the valid tokens of each block from ``lengths`` ``[B]``: int32 ``[B, T]``."""
    return (lengths[:, None] - torch.arange(blocks, dtype=torch.int32, device=lengths.device) * block).clamp(0, block)
