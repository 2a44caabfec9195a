"""Block-sparse attention: softmax over the tiles that compute, in the rows that compute.

For row ``i`` with key blocks ``J_i``: ``O_i = softmax(Q_i K_J^T * scale) V_J`` (FlashOmni, algorithm 1). Reused rows
are not launched, and their output is left to the caller (FlashOmni, section 3.5, uses the cached bias instead).

Two options compute the softmax tile by tile, in the order of the plan's list, with m the running maximum of each query:

    m' = max(m, s)     l' = e^(m - m') l + sum e^(S - m')     O' = e^(m - m') O + e^(S - m') V     s = row maxima of S

S is the scaled scores of a tile, with -inf for masked pairs (OmniAttention's CAUSAL and PARTIAL blocks). A group of
``PV_QUERIES`` queries skips a tile if ``s - m' < pv_threshold`` for all of them. This is SpargeAttn's skip by warps
(section 3.4), except that the tile does not count in the sum either, so the remaining weights still sum to one.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.attention.quantize import chosen_qk_dtype, qk_dtype_limit, simulate
from dit_accel.kernels.attention.slices import add_slices
from dit_accel.kernels.attention.tile_means import add_tile_means, require_whole_tiles
from dit_accel.kernels.backends import hopper_limit, resolve_backend
from dit_accel.kernels.custom_ops import custom_op, like
from dit_accel.kernels.plans.regions import rows_alike, rows_that_compute, take, tile_mask, token_index
from dit_accel.kernels.symbols import AttentionPlan

PV_QUERIES = 64  # queries that decide together which tiles ``pv_threshold`` skips


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    kv_len: torch.Tensor | None = None,
    pv_threshold: float | None = None,
    qk_dtype: str | None = None,
    tile_means: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the tiles of a plan. Forward only: no gradient flows.

    Args:
        q: ``[B, S, H, D]``, float16, bfloat16 or float32; any strides, the last being 1.
        k, v: ``[B, S, H_kv, D]`` like q, with H a multiple of H_kv; query head h reads key head ``h // (H / H_kv)``.
        plan: rows and tiles that compute, for B, H and S tokens, masks inside tiles, and single keys, which
            ``slices.py`` adds in q's dtype.
        scale: factor of the scores, positive; None = ``1 / sqrt(D)``.
        kv_len: int32 ``[B]``, number of valid keys of each sample; later keys are ignored, and tiles with only such
            keys count as not listed. None = all.
        pv_threshold: negative, in units of the scaled scores. 64 queries skip a tile if for each of them its best score
            is further than this below the best so far: a key in it would weigh less than ``e^pv_threshold`` times the
            best key. A row's last tile is never skipped. None = no tile is skipped.
        qk_dtype: None = q and k are multiplied in their dtype. "int8" = in 8 bits, with the few largest channels in
            float16; "int8+fp8" = also probabilities and v in float8 e4m3. The errors are 1% and 4% of the output's
            norm; see ``quantize.py``. "auto" = "int8" on sm86, sm89 and sm120.
        tile_means: tiles that the plan does not list join the softmax by the means of their keys and values
            (``tile_means.py``). The plan then has no masks, linear attention or single keys.
        return_lse: also return the log-sum-exp of the scaled scores.
        out: ``[B, S, H, D]`` like q, written in place. Reused rows keep their values; with None it is allocated
            **uninitialised**, so its reused rows hold garbage.
        backend: "auto", "reference", or one of these; "auto" takes the first one that supports the call:
            "cuda": Hopper; float16 and bfloat16, head dimensions 64 and 128, blocks of 128; masks without ``kv_len``.
            "triton": from sm80 on; head dimensions 16, 32, 64 and 128; ``pv_threshold`` in half precision,
            ``qk_dtype``, masks.

    Returns:
        ``out``, and with ``return_lse`` also the log-sum-exp, float32 ``[B, H, S]``, natural logarithm. The output of a
        query that computes but has no valid key is 0, with lse -inf. The lse of a reused row is -inf.
    """
    lse = None
    if return_lse:
        checks.require_shape("q", q, ("B", "S", "H", "D"))
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    options = {"scale": scale, "kv_len": kv_len, "pv_threshold": pv_threshold, "qk_dtype": qk_dtype}
    out = _attention(q, k, v, plan, tile_means=tile_means, lse=lse, out=out, backend=backend, **options)
    return out if lse is None else (out, lse)


@custom_op(like("q"), writes=["lse", "out"])
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scale: float | None,
    kv_len: torch.Tensor | None,
    pv_threshold: float | None,
    qk_dtype: str | None,
    tile_means: bool,
    lse: torch.Tensor | None,
    out: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """:func:`attention`, with ``lse`` float32 ``[B, H, S]`` to be written, or None."""
    require_arguments(q, k, v, plan, scale, kv_len, pv_threshold, out)
    qk_dtype = chosen_qk_dtype(q, plan, qk_dtype)
    if tile_means:
        require_whole_tiles(plan)
    chosen = resolve_backend(backend, q, _limits(q, k, v, plan, kv_len, pv_threshold, qk_dtype, out))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv_len = None if kv_len is None else kv_len.contiguous()  # kernels read it by address
    has_slices = plan.slices is not None
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if lse is None and (has_slices or tile_means):
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    if lse is not None:
        lse.fill_(-torch.inf)
    if chosen == "cuda":
        from dit_accel.kernels._cuda.attention import attention_into

        attention_into(q, k, v, plan, scale, kv_len, out, lse)
    elif chosen == "triton" and qk_dtype is not None:
        from dit_accel.kernels._triton.attention_int8 import attention_int8_into

        attention_int8_into(q, k, v, plan, scale, kv_len, pv_threshold, qk_dtype, out, lse)
    elif chosen == "triton":
        from dit_accel.kernels._triton.attention import attention_into

        attention_into(q, k, v, plan, scale, kv_len, pv_threshold, out, lse)
    elif qk_dtype is not None:
        _quantized_reference(q, k, v, plan, scale, kv_len, pv_threshold, qk_dtype, out, lse)
    else:
        _attention_reference(q, k, v, plan, scale, kv_len, pv_threshold, out, lse)
    if has_slices:
        add_slices(q, k, v, plan, scale, kv_len, out, lse, chosen)
    if tile_means:
        add_tile_means(q, k, v, plan, scale, kv_len, out, lse, chosen)
    return out


def _limits(q, k, v, plan, kv_len, pv_threshold, qk_dtype, out) -> dict[str, str | None]:
    """Return why each backend can't take the arguments, or None, in the order in which "auto" tries them."""
    from dit_accel.kernels._cuda.attention import limit as cuda_limit

    limits = {
        "cuda": hopper_limit(q) or cuda_limit(q, k, v, plan, kv_len, pv_threshold, qk_dtype, out),
        "triton": checks.triton_limit(q.shape[-1], plan)
        or _threshold_limit(q, pv_threshold)
        or qk_dtype_limit(q, plan, qk_dtype),
    }
    # one H200, 512 to 2048 tokens with masks, 8 heads of 64: Triton takes 6 to 28 us, the Hopper kernel 13 to 32
    return dict(reversed(limits.items())) if plan.masks is not None and plan.is_short else limits


def _attention_reference(q, k, v, plan, scale, kv_len, pv_threshold, out, lse) -> None:
    lengths = [plan.tokens] * plan.batch if kv_len is None else kv_len.clamp(0, plan.tokens).tolist()
    if plan.masks is not None or pv_threshold is not None:
        _attend_by_tile(q, k, v, plan, scale, lengths, pv_threshold, out, lse)
    elif lse is None and kv_len is None and q.shape[2] == k.shape[2] and bool((plan.kv_count == plan.blocks).all()):
        out.copy_(_dense(q, k, v, scale))
    else:
        _attend_by_row(q, k, v, plan, scale, lengths, out, lse)


def _quantized_reference(q, k, v, plan, scale, kv_len, pv_threshold, qk_dtype, out, lse) -> None:
    """Reference with rounded q, k and v; probabilities are not rounded to float8, which depends on the tiles' order."""
    simulated = simulate(q, k, v, plan, kv_len, qk_dtype)
    result = out.float()
    _attention_reference(simulated.q, simulated.k, simulated.v, plan, scale, kv_len, pv_threshold, result, lse)
    out.copy_(result)
    if lse is not None:
        lse.add_(torch.where(lse.isfinite(), simulated.shift * scale, 0.0))


def _attend_by_tile(q, k, v, plan, scale, lengths, pv_threshold, out, lse) -> None:
    """Attend tile by tile, for one group of queries after the other, by the formulas at the top of this file."""
    kv_group = q.shape[2] // k.shape[2]
    for b, h, row, listed in rows_that_compute(plan):
        tiles = [tile for tile in listed if tile * plan.block < lengths[b]]
        keys = [token_index([tile], plan.block, 0, lengths[b], q.device) for tile in tiles]
        masks = [tile_mask(plan, b, h, row, tile) for tile in tiles]
        for first in range(0, plan.block, PV_QUERIES):
            start = row * plan.block + first
            queries = slice(start, min(start + PV_QUERIES, plan.tokens))
            query = q[b, queries, h].float()
            maximum = query.new_full(query.shape[:1], -torch.inf)
            total, result = torch.zeros_like(maximum), torch.zeros_like(query)
            for position, (key, mask) in enumerate(zip(keys, masks, strict=True)):
                scores = query @ k[b, key, h // kv_group].float().T * scale
                if mask is not None:
                    scores.masked_fill_(~mask[first:, :][: scores.shape[0], : scores.shape[1]], -torch.inf)
                best = scores.amax(-1)
                new_maximum = torch.maximum(maximum, best)
                behind = torch.where(best.isinf(), best, best - new_maximum)  # -inf where a query has no key here
                if pv_threshold is not None and position + 1 < len(tiles) and (behind < pv_threshold).all():
                    continue
                shift = new_maximum.clamp(min=torch.finfo(torch.float32).min)  # finite, also before the first key
                probabilities, decay = (scores - shift[:, None]).exp(), (maximum - shift).exp()
                total = decay * total + probabilities.sum(-1)
                result = decay[:, None] * result + probabilities @ v[b, key, h // kv_group].float()
                maximum = new_maximum
            out[b, queries, h] = (result / total.where(total > 0, 1)[:, None]).to(out.dtype)
            if lse is not None:
                lse[b, h, queries] = maximum + total.log()


def _attend_by_row(q, k, v, plan, scale, lengths, out, lse) -> None:
    """Attend with one dense attention for each set of rows of a head that have the same tiles."""
    group = q.shape[2] // k.shape[2]
    for b, h, rows, tiles in rows_alike(plan):
        queries = token_index(rows, plan.block, 0, plan.tokens, q.device)
        keys = token_index(tiles, plan.block, 0, lengths[b], q.device)
        query = take(q[b, :, h], queries)
        key, value = take(k[b, :, h // group], keys), take(v[b, :, h // group], keys)
        if key.shape[0] == 0:
            out[b, queries, h] = 0
        else:
            out[b, queries, h] = _dense(query[None, :, None], key[None, :, None], value[None, :, None], scale)[0, :, 0]
        if lse is not None:
            scores = query.float() @ key.float().T * scale
            lse[b, h, queries] = scores.logsumexp(-1)  # -inf where there is no key


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (x.contiguous().transpose(1, 2) for x in (q, k, v))  # cuDNN does not support rows of odd strides
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def _threshold_limit(q: torch.Tensor, pv_threshold: float | None) -> str | None:
    """Return why backend "triton" does not support the option, or None."""
    if pv_threshold is not None and q.dtype == torch.float32:  # whole tiles do not fit the registers in float32
        return "with pv_threshold, q must have dtype torch.float16 or torch.bfloat16, got torch.float32"
    if pv_threshold is not None and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 10:
        return "triton 3.6 can't compile pv_threshold for compute capability 10"
    return None


def require_arguments(q, k, v, plan, scale, kv_len, pv_threshold, out) -> None:
    checks.require_floats("q", q, ("B", "S", "H", "D"))
    batch, tokens, heads, head_dim = q.shape
    checks.require_like("q", q, (batch, tokens, "H_kv", head_dim), k=k, v=v)
    if k.shape[2] != v.shape[2] or k.shape[2] == 0 or heads % k.shape[2]:
        raise ShapeError(f"heads of k and v must be as many and divide q's {heads}, got {k.shape[2]} and {v.shape[2]}")
    checks.require_like("q", q, (batch, tokens, heads, head_dim), out=out)
    checks.require_whole_plan(plan, q)
    if scale is not None and not scale > 0:
        raise ShapeError(f"scale must be positive, got {scale}")
    if pv_threshold is not None and not pv_threshold < 0:
        raise ShapeError(f"pv_threshold must be negative (relative to the best score), got {pv_threshold}; use None")
    checks.require_typed("q", q, (batch,), torch.int32, kv_len=kv_len)
