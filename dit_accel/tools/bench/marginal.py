"""Is SLA right: its critical and its marginal tiles in float64, by masks over all pairs of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dit_accel.kernels import unpack_bits
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.tools.bench.cases import Case
from dit_accel.tools.bench.verify import Verdict, judge, spread, worst


class Classes(NamedTuple):
    """Critical and marginal tiles of rows that compute: bool ``[B, H, T, T]`` each."""

    critical: torch.Tensor
    marginal: torch.Tensor


def classes_of(symbols: SparseSymbols) -> Classes:
    """Unpacked by the reference; every row computes."""
    tiles = (
        unpack_bits(bits, symbols.blocks, backend="reference") for bits in (symbols.skip_bits, symbols.linear_bits)
    )
    return Classes(*tiles)


def sla_of_queries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, is_critical, is_marginal
) -> torch.Tensor:
    """``O^s + Proj(O^l)`` of queries ``[..., n, D]``, in their own precision (SLA, equation 6), feature map softmax.

    Args:
        k, v: ``[..., S, D]``.
        weight: the projection ``[D, D]``.
        is_critical, is_marginal: which pairs attend, and which linear attention stands for: bool ``[..., n or 1, S]``.
    """
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    lowest = torch.finfo(q.dtype).min  # finite, so that a query without a key has gradients
    sparse = (scores.masked_fill(~is_critical, lowest).softmax(-1) * is_critical) @ v
    return sparse + linear_of_queries(q, k, v, is_marginal) @ weight.T


def linear_of_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_marginal: torch.Tensor) -> torch.Tensor:
    """``O^l`` alone; arguments as for :func:`sla_of_queries`."""
    weights = (q.softmax(-1) @ k.softmax(-1).transpose(-1, -2)) * is_marginal
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total > 0, total, 1.0)) @ v


def verify_rows(
    out: torch.Tensor,
    dq: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    do: torch.Tensor,
    classes: Classes,
    case: Case,
    samples: int,
) -> dict[str, Verdict]:
    """``out`` and the gradient dq of so many rows (batch, head, query block), the last one among them."""
    parts: dict[str, list[tuple[torch.Tensor, ...]]] = {"out": [], "dq": []}
    rows = torch.ones(classes.critical.shape[:3], dtype=torch.bool, device=q.device).nonzero()
    for b, h, row in spread(rows, samples).tolist():
        queries = slice(row * case.block, min((row + 1) * case.block, case.tokens))
        is_key = [tiles[b, h, row].repeat_interleave(case.block)[: case.tokens] for tiles in classes]
        head = q[b, queries, h], k[b, :, h], v[b, :, h], weight
        columns = {"out": [out[b, queries, h]], "dq": [dq[b, queries, h]]}
        for dtype in (torch.float64, q.dtype):
            query, *others = (x.to(dtype) for x in head)
            with torch.enable_grad():
                result = sla_of_queries(query.requires_grad_(), *others, *is_key)
            (gradient,) = torch.autograd.grad(result, query, do[b, queries, h].to(dtype))
            columns["out"].append(result.detach())
            columns["dq"].append(gradient)
        for name, column in columns.items():
            parts[name].append(tuple(column))
    return {name: judge(*map(torch.cat, zip(*columns, strict=True))) for name, columns in parts.items()}


def verify_gradients(
    gradients: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    do: torch.Tensor,
    classes: Classes,
    block: int,
) -> Verdict:
    """dq, dk, dv and the projection's gradient of a whole, short sequence, the worst of them."""
    tokens = q.shape[1]
    pairs = [tiles.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :tokens, :tokens] for tiles in classes]
    both = []
    for dtype in (torch.float64, q.dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, weight)]
        with torch.enable_grad():
            out = sla_of_queries(*(x.transpose(1, 2) for x in leaves[:3]), leaves[3], *pairs).transpose(1, 2)
        both.append(torch.autograd.grad(out, leaves, do.to(dtype)))
    return worst(judge(actual.to(low.dtype), exact, low) for actual, exact, low in zip(gradients, *both, strict=True))


def verify_linear_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    *,
    kv_len: torch.Tensor | None = None,
    samples: int | None = None,
) -> Verdict:
    """``O^l`` of rows that compute, ``samples`` of them or all; the others of ``out`` were NaN, and must still be."""
    head = torch.arange(plan.heads, device=q.device)
    rows = (plan.mask64[:, None] >> head[:, None] & 1).bool()
    marginal = unpack_bits(plan.linear_bits, plan.blocks, backend="reference")
    parts = []
    for b, h, row in spread(rows.nonzero(), samples).tolist():
        queries = slice(row * plan.block, min((row + 1) * plan.block, plan.tokens))
        keys = marginal[b, h, row].repeat_interleave(plan.block)[: plan.tokens].nonzero().flatten()
        if kv_len is not None:
            keys = keys[keys < kv_len[b]]
        every = torch.ones(1, len(keys), dtype=torch.bool, device=q.device)
        inputs = q[b, queries, h], k[b, keys, h], v[b, keys, h]
        exact, low = (linear_of_queries(*(x.to(dtype) for x in inputs), every) for dtype in (torch.float64, q.dtype))
        parts.append((out[b, queries, h], exact, low))
    computed = rows.repeat_interleave(plan.block, 2)[:, :, : plan.tokens].transpose(1, 2)
    untouched = torch.equal(out.isnan().all(-1), ~computed) and torch.equal(out.isnan().any(-1), ~computed)
    return judge(*map(torch.cat, zip(*parts, strict=True)), untouched)
