"""Compare attention, linear attention and their gradients with float64, at every computed row or at samples.

A row is a sample, a head and a block of queries. SLA's critical and marginal tiles are masks over token pairs here.
"""

import math
from collections.abc import Callable, Iterable

import torch

from dit_accel.kernels import unpack_bits
from dit_accel.kernels.symbols import SparseSymbols
from scripts.bench.kernels.cases import QKV, Inputs
from scripts.bench.kernels.verify import Verdict, judge, only_nan_where, spread, worst

Compared = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # actual, exact, low, as `judge` expects them
Classes = tuple[torch.Tensor, torch.Tensor]  # critical and marginal tiles, bool [B, H, T, T] each


def classes_of(symbols: SparseSymbols) -> Classes:
    """Unpack the classes with the reference; every row is computed."""
    bits = symbols.skip_bits, symbols.linear_bits
    critical, marginal = (unpack_bits(item, symbols.blocks, backend="reference") for item in bits)
    return critical, marginal


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """One head's attention in the tensors' own precision; 0 where a query has no key. ``keep``: attended pairs."""
    scores = q @ k.T * q.shape[-1] ** -0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def attend_linearly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """Linear attention of ``[..., n, D]`` over ``[..., S, D]`` in their own precision, with feature map softmax."""
    weights = q.softmax(-1) @ k.softmax(-1).transpose(-1, -2)
    if keep is not None:
        weights = weights * keep
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total > 0, total, 1.0)) @ v


def attend_as_sla(q, k, v, weight, is_critical: torch.Tensor, is_marginal: torch.Tensor) -> torch.Tensor:
    """`O^s + Proj(O^l)` of queries `[..., n, D]` over k, v `[..., S, D]`, in their own precision (SLA, equation 6).

    `is_critical`, `is_marginal`: attended pairs, and pairs of linear attention: bool `[..., n or 1, S]`.
    """
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    lowest = torch.finfo(q.dtype).min  # finite, so that a query without a key has gradients
    sparse = (scores.masked_fill(~is_critical, lowest).softmax(-1) * is_critical) @ v
    return sparse + attend_linearly(q, k, v, is_marginal) @ weight.T


def verify_attention(
    out: torch.Tensor,
    qkv: QKV,
    inputs: Inputs,
    *,
    samples: int | None = None,
    poisoned: bool = False,
    relative_bound: float | None = None,
    attend: Callable[..., torch.Tensor] = attend,
) -> Verdict:
    """Compare `samples` rows (None = all computed ones) of `out` `[B, S, H, D]` with float64.

    `poisoned`: `out` was filled with NaN, and its reused rows must still be NaN. `attend`: `attend`, or
    `attend_linearly` over the tiles of `inputs`.
    """
    q, k, v = qkv
    position = torch.arange(inputs.case.tokens, device=q.device)

    def compare(b: int, h: int, row: int) -> list[Compared]:
        queries, keys = inputs.tokens_of(row), inputs.keys_of(b, h, row)
        keep = None if inputs.attends is None else inputs.attends(position[queries, None], keys[None])
        head = q[b, queries, h], k[b, keys, h], v[b, keys, h]
        exact, low = (attend(*(x.to(dtype) for x in head), keep) for dtype in (torch.float64, q.dtype))
        return [(out[b, queries, h], exact, low)]

    untouched = not poisoned or only_nan_where(out, ~inputs.computed)
    judged = _judge_each(inputs.rows, samples, compare, untouched=untouched, relative_bound=relative_bound)
    return judged[0] if judged else Verdict(0.0, 0.0, untouched)


def verify_attention_gradients(gradients: QKV, qkv: QKV, do: torch.Tensor, inputs: Inputs, samples: int) -> Verdict:
    """Return the worst verdict on dq, dk and dv `[B, S, H, D]` of attention over the FULL tiles of `inputs`.

    dq is compared in `samples` rows, dk and dv in as many key blocks; these sum over all rows that attend to the block.
    """
    (dq, dk, dv), (q, k, v) = gradients, qkv
    dtypes = torch.float64, q.dtype

    def of_row(b: int, h: int, row: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return a row's dq, and its contribution to dk and dv of the keys that it attends to, ascending."""
        queries, keys = inputs.tokens_of(row), inputs.keys_of(b, h, row)
        leaves = [x.to(dtype).requires_grad_() for x in (q[b, queries, h], k[b, keys, h], v[b, keys, h])]
        return torch.autograd.grad(attend(*leaves), leaves, do[b, queries, h].to(dtype))

    def of_keys(b: int, h: int, column: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return dk and dv of a key block from all rows that attend to it; sums are in float32 at least."""
        tokens, sums = inputs.tokens_of(column), [0.0, 0.0]
        for row in inputs.tiles[b, h, :, column].nonzero().flatten().tolist():
            keys = inputs.keys_of(b, h, row)
            here = (keys >= tokens.start) & (keys < tokens.stop)
            for i, gradient in enumerate(of_row(b, h, row, dtype)[1:]):
                sums[i] = sums[i] + gradient[here].to(torch.promote_types(dtype, torch.float32))
        return [total.to(dtype) for total in sums]

    def compare_queries(b: int, h: int, row: int) -> list[Compared]:
        return [(dq[b, inputs.tokens_of(row), h], *(of_row(b, h, row, dtype)[0] for dtype in dtypes))]

    def compare_keys(b: int, h: int, column: int) -> list[Compared]:
        actual = [gradient[b, inputs.tokens_of(column), h] for gradient in (dk, dv)]
        return list(zip(actual, *(of_keys(b, h, column, dtype) for dtype in dtypes), strict=True))

    by_rows = _judge_each(inputs.rows, samples, compare_queries)
    return worst(by_rows + _judge_each(inputs.tiles.any(2), samples, compare_keys))


def verify_sla_rows(
    out: torch.Tensor,
    dq: torch.Tensor,
    qkv: QKV,
    weight: torch.Tensor,
    do: torch.Tensor,
    classes: Classes,
    inputs: Inputs,
    samples: int,
) -> list[Verdict]:
    """Compare ``samples`` rows of ``out`` and of the gradient dq."""
    case, (q, k, v) = inputs.case, qkv

    def compare(b: int, h: int, row: int) -> list[Compared]:
        queries = inputs.tokens_of(row)
        is_key = [tiles[b, h, row].repeat_interleave(case.block)[: case.tokens] for tiles in classes]
        columns = [(out[b, queries, h], dq[b, queries, h])]
        for dtype in (torch.float64, q.dtype):
            query, *others = (x.to(dtype) for x in (q[b, queries, h], k[b, :, h], v[b, :, h], weight))
            with torch.enable_grad():
                result = attend_as_sla(query.requires_grad_(), *others, *is_key)
            columns.append((result.detach(), *torch.autograd.grad(result, query, do[b, queries, h].to(dtype))))
        return list(zip(*columns, strict=True))

    return _judge_each(inputs.rows, samples, compare)


def verify_sla_gradients(
    gradients: tuple[torch.Tensor, ...], qkv: QKV, weight: torch.Tensor, do: torch.Tensor, classes: Classes, block: int
) -> Verdict:
    """Return the worst verdict on dq, dk, dv and the projection's gradient of a whole, short sequence."""
    tokens = do.shape[1]
    pairs = [tiles.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :tokens, :tokens] for tiles in classes]
    both = []
    for dtype in (torch.float64, do.dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (*qkv, weight)]
        with torch.enable_grad():
            out = attend_as_sla(*(x.transpose(1, 2) for x in leaves[:3]), leaves[3], *pairs).transpose(1, 2)
        both.append(torch.autograd.grad(out, leaves, do.to(dtype)))
    return worst(judge(actual.to(low.dtype), exact, low) for actual, exact, low in zip(gradients, *both, strict=True))


def _judge_each(
    entries: torch.Tensor, samples: int | None, compare: Callable[[int, int, int], Iterable[Compared]], **options
) -> list[Verdict]:
    """Return a verdict for each result of ``compare``, over ``samples`` of the True entries (None = all).

    ``options``: passed to :func:`judge`. Without a True entry there is no verdict.
    """
    by_entry = [compare(*entry) for entry in spread(entries.nonzero(), samples).tolist()]
    return [judge(*map(torch.cat, zip(*item, strict=True)), **options) for item in zip(*by_entry, strict=True)]
