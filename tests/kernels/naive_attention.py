"""Dense masked attention to compare with, and the comparison that every backend is held to."""

import math

import torch

from dit_accel.kernels import attention, unpack_bits
from dit_accel.kernels.symbols import FIRST_PARTIAL_TILE
from tests.kernels.conftest import assert_no_worse

LAYOUTS = {  # heads of the keys, and how q, k and v lie in memory
    "grouped": (2, None),
    "one-key-head": (1, None),
    "fused-projection": (4, "fused"),
    "heads-first": (4, "heads-first"),
    "odd-strides": (4, "odd"),  # rows of 17 half-precision numbers, and the copy engine needs a multiple of 16 bytes
    "large-scores": (4, "large"),
}


def laid_out(layout, make_tensor, tokens=130, head_dim=16, dtype=torch.float16, batch=2):
    """Return q, k and v with four heads of queries, in a layout of LAYOUTS."""
    key_heads, form = layout
    if form == "fused":
        return make_tensor(batch, tokens, 3, 4, head_dim, dtype=dtype).unbind(2)
    if form == "heads-first":
        return [make_tensor(batch, 4, tokens, head_dim, dtype=dtype).transpose(1, 2) for _ in range(3)]
    wide = head_dim + (form == "odd")
    q, k, v = (make_tensor(batch, tokens, heads, wide, dtype=dtype) for heads in (4, key_heads, key_heads))
    if form == "large":
        q, k = q * 5, k * 5
    return q[..., :head_dim], k[..., :head_dim], v[..., :head_dim]


def attending(sparsity):
    """The pairs that attend, bool ``[B, H, S, S]``, from the symbols that the plan was lowered from."""
    block, tokens, masks = sparsity.plan.block, sparsity.plan.tokens, sparsity.symbols.masks
    keys = sparsity.symbols.slice_bits
    pairs = sparsity.tiles.repeat_interleave(block, 2).repeat_interleave(block, 3)
    if masks is not None:
        codes = masks.codes.expand_as(sparsity.tiles)
        by_pair = codes.repeat_interleave(block, 2).repeat_interleave(block, 3)
        token = torch.arange(pairs.shape[-1], device=pairs.device)
        pool = unpack_bits(masks.pool, block, backend="reference")[(codes - FIRST_PARTIAL_TILE).clamp(min=0).long()]
        partial = pool.transpose(3, 4).flatten(2, 3).flatten(3, 4)  # [B, H, T, T, i, j] to [B, H, T * i, T * j]
        pairs = pairs & torch.where(by_pair == 1, token <= token[:, None], (by_pair == 0) | partial)
    if keys is not None:
        pairs = pairs | unpack_bits(keys, pairs.shape[-1]).repeat_interleave(block, 2)
    return pairs[:, :, :tokens, :tokens]


def dense(q, k, v, pairs, scale=None, kv_len=None):
    """Masked dense attention in q's dtype: out ``[B, S, H, D]`` and lse ``[B, H, S]``; 0 and -inf without a key."""
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    if kv_len is not None:
        pairs = pairs & (torch.arange(tokens, device=q.device) < kv_len[:, None, None, None])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = scores.masked_fill(~pairs, -math.inf)
    probabilities = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", probabilities, v), scores.double().logsumexp(-1)


def check(q, k, v, sparsity, backend, pairs=None, pv_threshold=None, **options):
    """Return the output; it equals float64's where rows compute, even with NaN beyond ``kv_len``, else the poison."""
    computed, poisoned = sparsity.tokens_computed(), torch.full_like(q, math.nan)
    call = {"return_lse": True, "out": poisoned, "pv_threshold": pv_threshold, "backend": backend}
    out, lse = attention(q, k, v, sparsity.plan, **call, **options)
    assert out is poisoned and torch.equal(out.isnan().any(-1), ~computed)
    assert torch.equal(out.isnan().all(-1), ~computed)
    pairs = attending(sparsity) if pairs is None else pairs
    exact, exact_lse = dense(*(x.double() for x in (q, k, v)), pairs, **options)
    low, _ = dense(q, k, v, pairs, **options)
    assert_no_worse(out[computed], exact[computed], low[computed])
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)  # -inf in reused and in empty rows
    if (lengths := options.get("kv_len")) is not None:
        is_beyond = (torch.arange(q.shape[1], device=q.device) >= lengths[:, None])[..., None, None]
        k, v = (x.masked_fill(is_beyond, math.nan) for x in (k, v))
        again = attention(q, k, v, sparsity.plan, pv_threshold=pv_threshold, backend=backend, **options)
        assert torch.equal(again[computed], out[computed])
    return out
