"""Block-sparse attention: softmax over the tiles that compute, on the rows that compute.

For row ``i`` with key blocks ``J_i``: ``O_i = softmax(Q_i K_J^T * scale) V_J`` (FlashOmni, algorithm 1). Reused rows
are not launched: what their output holds is the caller's business (FlashOmni, section 3.5, the cached bias stands in).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.checks import (
    FLOAT_DTYPES,
    require_dtype,
    require_plan,
    require_same,
    require_shape,
    require_triton_head_dim,
    require_unit_stride,
)
from dit_accel.kernels.regions import take, token_index
from dit_accel.symbols import AttentionPlan


@torch.no_grad()
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    kv_len: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the tiles of a plan. Forward only: no gradient flows.

    Args:
        q: ``[B, S, H, D]``, float16, bfloat16 or float32; any strides, the last being 1.
        k, v: ``[B, S, H_kv, D]`` like q, with H a multiple of H_kv; query head h reads key head ``h // (H / H_kv)``.
        plan: which rows and tiles compute, for B, H and S tokens.
        scale: factor of the scores, positive; None = ``1 / sqrt(D)``.
        kv_len: int32 ``[B]``, valid keys of each sample; later keys take no part. None = all.
        return_lse: also return the log-sum-exp of the scaled scores.
        out: ``[B, S, H, D]`` like q, written in place. Reused rows keep what it holds; with None it is allocated
            **uninitialised**, so its reused rows hold garbage.
        backend: "auto", "reference" or "triton" (head dimensions 16, 32, 64 and 128).

    Returns:
        ``out``, and with ``return_lse`` also float32 ``[B, H, S]``, natural logarithm. A row that computes but has no
        valid key is 0, with lse -inf. The lse of a reused row is -inf.

    Raises:
        ShapeError: a shape, dtype, stride or device does not fit, or ``scale`` is not positive.
        UnsupportedError: the backend does not support the head dimension.
        BackendError: ``backend`` can't run here.
    """
    _require_arguments(q, k, v, plan, scale, kv_len, out)
    chosen = resolve_backend(backend, q)
    if chosen == "triton":
        require_triton_head_dim(q.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    batch, tokens, heads, _ = q.shape
    lse = q.new_full((batch, heads, tokens), -torch.inf, dtype=torch.float32) if return_lse else None
    if chosen == "triton":
        from dit_accel.kernels._triton.attention import attention_into

        attention_into(q, k, v, plan, scale, kv_len, out, lse)
    else:
        _attention_reference(q, k, v, plan, scale, kv_len, out, lse)
    return (out, lse) if return_lse else out


def _attention_reference(q, k, v, plan, scale, kv_len, out, lse) -> None:
    """Rows of a head with the same tiles go through one dense attention over just those keys."""
    batch, tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    if kv_len is None and lse is None and group == 1 and bool((plan.kv_count == plan.blocks).all()):
        out.copy_(_dense(q, k, v, scale))
        return
    row_count, row_index = plan.row_count.tolist(), plan.row_index.tolist()
    kv_count, kv_index = plan.kv_count.tolist(), plan.kv_index.tolist()
    lengths = [tokens] * batch if kv_len is None else kv_len.clamp(0, tokens).tolist()
    for b in range(batch):
        for h in range(heads):
            rows_of_tiles: dict[tuple[int, ...], list[int]] = {}
            for row in row_index[b][h][: row_count[b][h]]:
                tiles = tuple(kv_index[b][h][row][: kv_count[b][h][row]])
                rows_of_tiles.setdefault(tiles, []).append(row)
            for tiles, rows in rows_of_tiles.items():
                queries = token_index(rows, plan.block, 0, tokens, q.device)
                keys = token_index(tiles, plan.block, 0, lengths[b], q.device)
                query = take(q[b, :, h], queries)
                key, value = take(k[b, :, h // group], keys), take(v[b, :, h // group], keys)
                out[b, queries, h] = _attend(query, key, value, scale)
                if lse is not None:
                    scores = query.float() @ key.float().T * scale
                    lse[b, h, queries] = scores.logsumexp(-1)  # -inf where there is no key


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One head's dense attention, ``[n, D], [m, D], [m, D] -> [n, D]``; 0 where there is no key."""
    if key.shape[0] == 0:
        return torch.zeros_like(query)
    return _dense(query[None, :, None], key[None, :, None], value[None, :, None], scale)[0, :, 0]


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def _require_arguments(q, k, v, plan, scale, kv_len, out) -> None:
    require_shape("q", q, ("B", "S", "H", "D"))
    require_dtype("q", q, FLOAT_DTYPES)
    batch, tokens, heads, head_dim = q.shape
    for name, x in (("k", k), ("v", v)):
        require_shape(name, x, (batch, tokens, "H_kv", head_dim))
        require_same(name, x, "q", q)
    if k.shape[2] != v.shape[2] or k.shape[2] == 0 or heads % k.shape[2]:
        raise ShapeError(
            f"k and v must have one number of heads that divides q's {heads}, got {k.shape[2]} and {v.shape[2]}"
        )
    if out is not None:
        require_shape("out", out, (batch, tokens, heads, head_dim))
        require_same("out", out, "q", q)
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if x is not None:
            require_unit_stride(name, x)
    require_plan(plan, "q", q, heads)
    if plan.tokens != tokens:
        raise ShapeError(f"plan must have q's {tokens} tokens, got {plan.tokens}; lower symbols of the same length")
    if scale is not None and not scale > 0:
        raise ShapeError(f"scale must be positive, got {scale}")
    if kv_len is not None:
        require_shape("kv_len", kv_len, (batch,))
        require_dtype("kv_len", kv_len, (torch.int32,))
        if kv_len.device != q.device:
            raise ShapeError(f"kv_len must be on q's device {q.device}, got {kv_len.device}")
