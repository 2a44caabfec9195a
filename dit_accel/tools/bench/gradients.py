"""Are the gradients of sparse attention right: against float64 autograd, at sample rows and sample key blocks."""

from __future__ import annotations

import torch

from dit_accel.tools.bench.cases import Inputs
from dit_accel.tools.bench.verify import Verdict, judge, spread, worst

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def verify_attention_gradients(
    gradients: Gradients,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    inputs: Inputs,
    samples: int,
) -> Verdict:
    """The worst of dq, dk and dv for attention over the tiles of ``inputs`` (FULL ones) whose output has gradient do.

    Args:
        gradients: dq, dk, dv ``[B, S, H, D]``.
        q, k, v, do: ``[B, S, H, D]``.
        samples: rows where dq is looked at, and key blocks where dk and dv are; those are summed over all rows that
            attend to the block.
    """
    dq, dk, dv = gradients
    parts: dict[str, list[tuple[torch.Tensor, ...]]] = {"dq": [], "dk": [], "dv": []}
    for b, h, row in spread(inputs.rows.nonzero(), samples).tolist():
        exact, low = (_of_row(q, k, v, do, inputs, b, h, row, dtype)[0] for dtype in (torch.float64, q.dtype))
        parts["dq"].append((dq[b, _tokens(inputs, row), h], exact, low))
    for b, h, column in spread(inputs.tiles.any(2).nonzero(), samples).tolist():
        keys = _tokens(inputs, column)
        sums = [_of_keys(q, k, v, do, inputs, b, h, column, dtype) for dtype in (torch.float64, q.dtype)]
        for name, actual, exact, low in zip(("dk", "dv"), (dk, dv), *sums, strict=True):
            parts[name].append((actual[b, keys, h], exact, low))
    return worst(
        judge(*(torch.cat(column) for column in zip(*of_one, strict=True))) for of_one in parts.values() if of_one
    )


def _tokens(inputs: Inputs, block: int) -> slice:
    size = inputs.case.block
    return slice(block * size, min((block + 1) * size, inputs.case.tokens))


def _of_row(q, k, v, do, inputs: Inputs, b: int, h: int, row: int, dtype: torch.dtype) -> Gradients:
    """What a row gives to dq, and to dk and dv of the keys that it attends to, ascending; by autograd in ``dtype``."""
    queries = _tokens(inputs, row)
    keys = _keys_of_row(inputs, b, h, row)
    leaves = [x.to(dtype).requires_grad_() for x in (q[b, queries, h], k[b, keys, h], v[b, keys, h])]
    query, key, value = leaves
    out = (query @ key.T * query.shape[-1] ** -0.5).softmax(-1) @ value
    return torch.autograd.grad(out, leaves, do[b, queries, h].to(dtype))


def _of_keys(q, k, v, do, inputs: Inputs, b: int, h: int, column: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """dk and dv of a key block: the sums over the rows that attend to it, in ``dtype`` at least in float32."""
    sums: list[torch.Tensor | float] = [0.0, 0.0]
    for row in inputs.tiles[b, h, :, column].nonzero().flatten().tolist():
        keys = _keys_of_row(inputs, b, h, row)
        tokens = _tokens(inputs, column)
        here = (keys >= tokens.start) & (keys < tokens.stop)
        for i, gradient in enumerate(_of_row(q, k, v, do, inputs, b, h, row, dtype)[1:]):
            sums[i] = sums[i] + gradient[here].to(torch.promote_types(dtype, torch.float32))
    return [total.to(dtype) for total in sums]


def _keys_of_row(inputs: Inputs, b: int, h: int, row: int) -> torch.Tensor:
    is_key = inputs.tiles[b, h, row].repeat_interleave(inputs.case.block)[: inputs.case.tokens]
    return is_key.nonzero().flatten()
