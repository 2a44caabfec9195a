"""Approximation of skipped tiles: each joins its row's softmax as one key, the mean of its block.

For a tile j that a plan does not list, of n_j valid keys with means ``k_j`` and ``v_j`` (the first term of an expansion
by blocks, as in PISA, arXiv 2602.01077):

    sum_i e^(q k_i) -> n_j e^(q k_j)     sum_i e^(q k_i) v_i -> n_j e^(q k_j) v_j

The softmax over the listed tiles then continues, as over the single keys of ``slices.py``. By Jensen's inequality the
mean weighs less than its block. A second moment overshoots, because keys of a block are not normally distributed.
"""

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.plans.pooling import block_means, valid_tokens
from dit_accel.kernels.plans.regions import computing_rows, listed_tiles
from dit_accel.kernels.symbols import AttentionPlan


def require_whole_tiles(plan: AttentionPlan) -> None:
    """Check that a plan skips whole tiles only, and that nothing else replaces them."""
    for name, owner in (("masks", "masked tiles"), ("linear_bits", "linear attention"), ("slices", "single keys")):
        if getattr(plan, name) is not None:
            raise ShapeError(f"tile_means must be False with plan.{name}: it can't be combined with {owner}")


def add_tile_means(q, k, v, plan, scale, kv_len, out, lse, backend) -> None:
    """Continue the softmax over a plan's tiles with the means of all other tiles, in place, as in :mod:`slices`."""
    means = [_block_means(x, plan, kv_len) for x in (k, v)]
    if backend == "reference":
        _add_reference(q, *means, plan, scale, kv_len, out, lse)
        return
    from dit_accel.kernels._triton.tile_means import add_tile_means_into

    add_tile_means_into(q, *means, plan, scale, kv_len, listed_tiles(plan).contiguous(), out, lse)


def _block_means(x: torch.Tensor, plan: AttentionPlan, kv_len: torch.Tensor | None) -> torch.Tensor:
    """Means of blocks' valid tokens, ``[B, S, H, D]`` -> ``[B, H, T, D]`` in x's dtype; 0 if a block has none."""
    if kv_len is None:
        return block_means(x, plan.block).transpose(1, 2).contiguous()
    x = x.masked_fill((torch.arange(plan.tokens, device=x.device) >= kv_len[:, None])[..., None, None], 0)
    share = _valid_keys(plan, kv_len) / _valid_keys(plan, kv_len.new_tensor([plan.tokens]))
    means = block_means(x, plan.block, torch.float32) / share.where(share > 0, 1)[..., None, None]
    return means.to(x.dtype).transpose(1, 2).contiguous()


def _valid_keys(plan: AttentionPlan, lengths: torch.Tensor) -> torch.Tensor:
    return valid_tokens(lengths.clamp(0, plan.tokens), plan.blocks, plan.block).float()


def _add_reference(q, mean_k, mean_v, plan, scale, kv_len, out, lse) -> None:
    lengths = torch.tensor([plan.tokens], device=q.device) if kv_len is None else kv_len
    counts = _valid_keys(plan, lengths).expand(plan.batch, -1)
    mean_k, mean_v = (means.float().repeat_interleave(q.shape[2] // mean_k.shape[1], 1) for means in (mean_k, mean_v))
    skipped = ~listed_tiles(plan) & computing_rows(plan)[..., None] & (counts > 0)[:, None, None]
    skipped = skipped.repeat_interleave(plan.block, 2)[:, :, : plan.tokens]  # [B, H, S, T]
    scores = torch.einsum("bshd,bhtd->bhst", q.float(), mean_k) * scale + counts.log()[:, None, None]
    scores.masked_fill_(~skipped, -torch.inf)
    total = torch.logaddexp(lse, scores.logsumexp(-1))
    shift = total.clamp(min=torch.finfo(torch.float32).min)  # finite even if a query has no key
    joined = torch.einsum("bhst,bhtd->bshd", (scores - shift[..., None]).exp(), mean_v)
    before = (lse - shift).exp().transpose(1, 2)[..., None]
    rows = skipped.any(-1).transpose(1, 2)[..., None]  # other rows keep their values
    out.copy_(torch.where(rows, torch.where(before > 0, before * out.float(), 0) + joined, out.float()))
    lse.copy_(total)
