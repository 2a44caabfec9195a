"""Compare an op's result with float64: the largest error at every token, or at sampled tokens of long sequences.

A result passes if its error is at most twice the error of the dense computation in its own precision plus the rounding
of the largest value, and if everything that the symbols mark as reused is unchanged.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dit_accel import kernels
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from scripts.bench.kernels.cases import Inputs

# Half-precision results are rounded once, from float32 sums. Float32 results carry the rounding of the sums, which
# depends on their order.
ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16)}
ROUNDING[torch.float32] = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Verdict:
    """Largest error, its bound, and whether reused parts are unchanged."""

    error: float
    bound: float
    untouched: bool = True

    @property
    def passed(self) -> bool:
        return self.untouched and self.error <= self.bound  # NaN fails

    def fields(self) -> dict[str, Any]:
        """Columns of a JSON row; an error of NaN becomes None."""
        error = self.error if math.isfinite(self.error) else None
        return {"error": error, "bound": self.bound, "untouched": self.untouched, "passed": self.passed}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict with the largest error relative to its bound; a failed one comes before any that passed."""
    return max(verdicts, key=lambda verdict: (not verdict.passed, verdict.error / max(verdict.bound, 1e-30)))


def judge(
    actual: torch.Tensor,
    exact: torch.Tensor,
    low: torch.Tensor,
    untouched: bool = True,
    relative_bound: float | None = None,
) -> Verdict:
    """Compare ``actual`` with the float64 ``exact``; ``low`` is the dense computation in the op's own precision.

    ``relative_bound``: limit ``‖actual − exact‖ / ‖exact‖`` by this bound instead, for quantised attention.
    """
    if relative_bound is not None:
        return Verdict(float((actual.double() - exact).norm() / exact.norm()), relative_bound, untouched)
    bound = 2 * _largest(low.double() - exact) + ROUNDING[actual.dtype] * _largest(exact)
    return Verdict(_largest(actual.double() - exact), bound, untouched)


def exactly(same: bool) -> Verdict:
    """Verdict on a result without an error value: equal or not."""
    return Verdict(0.0 if same else math.inf, 0.0)


def differing(actual: torch.Tensor, expected: torch.Tensor, length: int) -> float:
    """Share of packed bits, ``length`` per row, that differ from the expected ones."""
    return (kernels.unpack_bits(actual, length) != kernels.unpack_bits(expected, length)).double().mean().item()


def verify_packing(packed: torch.Tensor, inputs: Inputs) -> Verdict:
    """Verify that the bytes equal the reference's, which unpack to the tiles of ``inputs``."""
    same = torch.equal(packed, kernels.pack_bits(inputs.tiles, backend="reference"))
    unpacked = kernels.unpack_bits(packed, inputs.tiles.shape[-1], backend="reference")
    return exactly(same and torch.equal(unpacked, inputs.tiles))


def verify_plan(plan: AttentionPlan, symbols: SparseSymbols) -> Verdict:
    """Verify that every list of the plan equals the reference's, up to its count."""
    expected = kernels.lower(symbols, backend="reference")
    same = torch.equal(plan.mask64, expected.mask64)
    if plan.full_count is not None:
        same &= torch.equal(plan.full_count, expected.full_count)
    for lists, counts in (("kv_index", "kv_count"), ("work", "work_count")):
        count, index = getattr(plan, counts), getattr(plan, lists)
        used = (torch.arange(index.shape[-1], device=index.device) < count[..., None]).view_as(index)
        same &= torch.equal(count, getattr(expected, counts))
        same &= torch.equal(index[used], getattr(expected, lists)[used])
    return exactly(same)


def verify_gemm_q(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    inputs: Inputs,
    *,
    norm_weight: torch.Tensor | None = None,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    samples: int | None = None,
    poisoned: bool = False,
) -> Verdict:
    """Verify the computed queries ``[B, S, H, D]`` in ``samples`` row-blocks of all heads (None = all)."""
    tokens = _tokens(inputs, samples)
    chosen = inputs.computed[:, tokens]
    tables = None if rope is None else tuple(table[tokens] for table in rope)
    arguments = x[:, tokens], weight, bias, inputs.case.head_dim, norm_weight, tables
    exact, low = (dense_query(*arguments, dtype)[chosen] for dtype in (torch.float64, x.dtype))
    return judge(out[:, tokens][chosen], exact, low, not poisoned or only_nan_where(out, ~inputs.computed))


def dense_query(x, weight, bias, head_dim, norm_weight, rope, dtype: torch.dtype) -> torch.Tensor:
    """Project queries of every head ``[B, S, H, D]``; norm and rotation in float32 or wider, as in a model."""
    query = F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype)).unflatten(-1, (-1, head_dim))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if norm_weight is not None:
        query = query.to(wide)
        query = query * (query.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight
    if rope is not None:
        even, odd = query.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((-odd, even), -1).flatten(-2)
        query = query * rope[0].to(wide)[:, None] + turned * rope[1].to(wide)[:, None]
    return query.to(dtype)


def verify_gemm_o_update(
    out: torch.Tensor,
    stack: torch.Tensor,
    features: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    inputs: Inputs,
    *,
    samples: int | None = None,
) -> dict[str, Verdict]:
    """Verify the dense output and each B_m; ``features`` are o and its history, ``[B, S, H, D]``."""
    tokens = _tokens(inputs, samples)
    computed = inputs.computed[:, tokens, :, None]
    verdicts = {"out": judge(out[:, tokens], *_linears(features[0][:, tokens], weight, bias))}
    for entry, values in enumerate(features):
        reused = torch.where(computed, 0.0, values[:, tokens])
        verdicts[f"B_{entry}"] = judge(stack[entry][:, tokens], *_linears(reused, weight, bias))
    return verdicts


def verify_gemm_o_dispatch(
    out: torch.Tensor,
    o: torch.Tensor,
    weight: torch.Tensor,
    stack: torch.Tensor,
    weights: Sequence[float],
    inputs: Inputs,
    *,
    samples: int | None = None,
) -> Verdict:
    """Verify ``Σ_m w_m B_m`` plus the computed heads; reused rows of ``o`` must have no effect."""
    tokens = _tokens(inputs, samples)
    exact, low = _linears(torch.where(inputs.computed[:, tokens, :, None], o[:, tokens], 0.0), weight, None)
    for factor, entry in zip(weights, stack[:, :, tokens], strict=True):
        exact, low = exact + factor * entry.double(), low + factor * entry
    return judge(out[:, tokens], exact, low)


def verify_pooled_map(actual: kernels.PooledMap, q: torch.Tensor, k: torch.Tensor, block: int) -> dict[str, Verdict]:
    """Verify each part of a pooled map against the reference, which computes in float32."""
    low = kernels.pooled_map(q, k, block, backend="reference")
    (q_mean, q_similarity), (k_mean, k_similarity) = (_block_statistics(x.double(), block) for x in (q, k))
    centred = k_mean - k.double().mean(1)[:, :, None]
    exact = {
        "probabilities": (q_mean @ centred.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1),
        "q_similarity": q_similarity,
        "k_similarity": k_similarity,
    }
    return {name: judge(getattr(actual, name), values, getattr(low, name)) for name, values in exact.items()}


def verify_weighted_sum(out: torch.Tensor, history: Sequence[torch.Tensor], weights: Sequence[float]) -> Verdict:
    exact, low = (
        sum(factor * features.to(dtype) for factor, features in zip(weights, history, strict=True))
        for dtype in (torch.float64, out.dtype)
    )
    return judge(out, exact, low)


def _linears(features, weight, bias) -> tuple[torch.Tensor, torch.Tensor]:
    """Project ``[B, S, H, D]`` in float64 and in the features' precision."""
    flat = features.flatten(2)
    exact = F.linear(flat.double(), weight.double(), None if bias is None else bias.double())
    return exact, F.linear(flat, weight, bias)


def _block_statistics(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Means ``[B, H, T, D]`` and mean pairwise cosines ``[B, H, T]`` of ``[B, S, H, D]``."""
    parts = [part.transpose(1, 2) for part in x.split(block, 1)]  # [B, H, n, D]
    units = [part / part.norm(dim=-1, keepdim=True) for part in parts]
    cosines = [(unit @ unit.transpose(-1, -2)).mean((-1, -2)) for unit in units]
    return torch.stack([part.mean(2) for part in parts], 2), torch.stack(cosines, 2)


def _tokens(inputs: Inputs, samples: int | None) -> torch.Tensor:
    """Tokens of ``samples`` row-blocks, including the ragged last one."""
    case = inputs.case
    blocks = spread(torch.arange(inputs.rows.shape[-1], device=inputs.rows.device), samples)
    tokens = (blocks[:, None] * case.block + torch.arange(case.block, device=blocks.device)).flatten()
    return tokens[tokens < case.tokens]


def spread(entries: torch.Tensor, samples: int | None) -> torch.Tensor:
    """Return ``samples`` evenly spread entries, including the last one."""
    if samples is None or samples >= len(entries):
        return entries
    return entries[torch.linspace(0, len(entries) - 1, samples + 1, device=entries.device).round().long()[1:]]


def only_nan_where(out: torch.Tensor, reused: torch.Tensor) -> bool:
    """Return True if reused (token, head) pairs are all NaN and the others have no NaN."""
    is_nan = out.isnan()
    return torch.equal(is_nan.all(-1), reused) and torch.equal(is_nan.any(-1), reused)


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
