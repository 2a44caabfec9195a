"""Gradients of block-sparse attention over the tiles of a plan (SLA, equation 7), and the differentiable op.

For a row with key blocks J, scaled scores S, output O and the gradient dO of O:

    P  = exp(S - lse)      dV += P^T dO      dP = dO V^T      delta = rowsum(dO * O)
    dS = P * (dP - delta)  dQ  = scale * dS K                 dK += scale * dS^T Q

No gradient flows through the choice of the tiles. dQ sums along the plan's lists, dK and dV along the transposed ones
(:func:`~dit_accel.kernels.transpose_lists`), so each result has one writer and runs repeat bit by bit.
"""

import torch

from dit_accel.errors import ShapeError, UnsupportedError
from dit_accel.kernels import checks
from dit_accel.kernels.attention.attention import attention, require_arguments
from dit_accel.kernels.backends import TRITON_ONLY, resolve_backend
from dit_accel.kernels.custom_ops import custom_op, like
from dit_accel.kernels.plans.regions import rows_alike, take, tile_mask, token_index
from dit_accel.kernels.plans.transpose import transpose_lists
from dit_accel.kernels.symbols import AttentionPlan

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@custom_op(like("q", "k", "v"))
def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    kv_len: torch.Tensor | None = None,
    backend: str = "auto",
) -> Gradients:
    """Gradients of ``attention(q, k, v, plan, scale=scale, kv_len=kv_len)`` for q, k and v, with as many key heads.

    Args:
        o, lse: results of attention with ``return_lse``; rows of o and do that do not compute may hold anything.
        do: ``[B, S, H, D]`` like q, gradient of o.

    Returns:
        dq, dk, dv: ``[B, S, H, D]`` in q's dtype, contiguous; sums are in float32. Rows that do not compute, or have no
        key, have dq 0 and add nothing to dk and dv; keys that no query attends to have dk and dv 0.
    """
    _require_arguments(q, k, v, o, lse, do, plan, scale, kv_len)
    chosen = resolve_backend(backend, q, {"triton": checks.triton_limit(q.shape[-1], plan)})
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if chosen == "reference":
        return _attention_backward_reference(q, k, v, o, lse, do, plan, scale, kv_len)
    from dit_accel.kernels._triton.attention_backward import attention_backward as attention_backward_triton

    kv_len = None if kv_len is None else kv_len.contiguous()  # kernels read it by address
    by_key = transpose_lists(plan, order="head", backend=chosen)
    return attention_backward_triton(q, k, v, o, lse, do, plan, by_key, scale, kv_len)


def differentiable_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    kv_len: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention over the tiles of a plan with gradients for q, k and v (no second derivatives).

    Backends "reference" and "triton" also run the gradients; with any other these run with "auto". Rows that do not
    compute are 0, and no gradient flows from them.
    """
    _require_one_key_head_each(q, k)
    return _Attention.apply(q, k, v, plan, scale, kv_len, backend)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale, kv_len, backend):
        options = {"scale": scale, "kv_len": kv_len}
        out = q.new_zeros(q.shape)
        out, lse = attention(q, k, v, plan, return_lse=True, out=out, backend=backend, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        ctx.options = options | {"backend": backend if backend in ("reference", *TRITON_ONLY) else "auto"}
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        do = do if do.stride(-1) == 1 else do.contiguous()  # the gradient of a sum has stride 0
        return *attention_backward(*ctx.saved_tensors, do, ctx.plan, **ctx.options), None, None, None, None


def _attention_backward_reference(q, k, v, o, lse, do, plan, scale, kv_len) -> Gradients:
    lengths = [plan.tokens] * plan.batch if kv_len is None else kv_len.clamp(0, plan.tokens).tolist()
    dq = q.new_zeros(q.shape)
    dk, dv = (q.new_zeros(q.shape, dtype=torch.float32) for _ in range(2))
    for b, h, rows, tiles in rows_alike(plan):
        queries = token_index(rows, plan.block, 0, plan.tokens, q.device)
        keys = token_index(tiles, plan.block, 0, lengths[b], q.device)
        query, gradient, output = (take(x[b, :, h], queries).float() for x in (q, do, o))
        key, value = (take(x[b, :, h], keys).float() for x in (k, v))
        row_lse = take(lse[b, h], queries)
        shift = torch.where(row_lse == -torch.inf, torch.inf, row_lse)[:, None]  # a query without a key: P = 0
        probabilities = (query @ key.T * scale - shift).exp()
        if plan.masks is not None:
            probabilities *= _pairs(plan, b, h, rows, tiles)[: query.shape[0], : key.shape[0]]
        score_gradient = probabilities * (gradient @ value.T - (gradient * output).sum(-1, keepdim=True))
        dq[b, queries, h] = (score_gradient @ key * scale).to(q.dtype)
        dk[b, keys, h] += score_gradient.T @ query * scale
        dv[b, keys, h] += probabilities.T @ gradient
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _pairs(plan: AttentionPlan, b: int, h: int, rows: list[int], tiles: tuple[int, ...]) -> torch.Tensor:
    """Return the pairs of a row that attend, bool ``[block, tiles * block]``."""
    every_pair = torch.ones(plan.block, plan.block, dtype=torch.bool, device=plan.kv_count.device)
    masks = [tile_mask(plan, b, h, rows[0], tile) for tile in tiles]
    return torch.cat([every_pair[:, :0], *(every_pair if mask is None else mask for mask in masks)], -1)


def _require_arguments(q, k, v, o, lse, do, plan, scale, kv_len) -> None:
    require_arguments(q, k, v, plan, scale, kv_len, None, None)
    if plan.slices is not None:
        raise UnsupportedError("plan must have no slices when gradients are needed; use a policy of whole tiles")
    _require_one_key_head_each(q, k)
    checks.require_like("q", q, tuple(q.shape), o=o, do=do)
    batch, tokens, heads, _ = q.shape
    checks.require_typed("q", q, (batch, heads, tokens), torch.float32, lse=lse)


def _require_one_key_head_each(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.dim() == k.dim() == 4 and q.shape[2] != k.shape[2]:
        rule = f"k and v must have q's {q.shape[2]} heads when gradients are needed"
        raise ShapeError(f"{rule}, got {k.shape[2]}; repeat them with repeat_interleave along axis 2")
