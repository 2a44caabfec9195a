"""Kernel of all forecasts: a weighted sum of remembered features, ``sum_m w_m F_m``.

TaylorSeer's expansion becomes such a sum when its finite differences are written out; plain reuse (FORA) is one too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op
from dit_accel.kernels.layout import BLOCK_SIZES
from dit_accel.kernels.plans.regions import regions
from dit_accel.kernels.symbols import AttentionPlan

DTYPES = (*checks.FLOAT_DTYPES, torch.float64)  # float64 in the reference alone


@eager_op
def weighted_sum(
    history: Sequence[torch.Tensor],
    weights: Sequence[float],
    *,
    plan: AttentionPlan | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``sum_m weights[m] * history[m]``, summed in float32 or float64 and rounded once. Forward only: no gradient.

    Args:
        history: M >= 1 tensors of one shape ``[...]``, dtype (float16, bfloat16, float32; the reference takes float64
            too) and device; or a stacked ``[M, ...]`` tensor.
        weights: M floats.
        plan: write only the rows that it reuses; the features are then ``[B, S, H, D]`` over the plan's sequence.
        out: like a history entry, or one of them; required with a plan (last stride 1), else None = allocated.

    Returns:
        ``out``; with a plan, rows that compute keep their values.
    """
    _require_arguments(history, weights, plan, out)
    first = history[0]
    out = torch.empty_like(first, memory_format=torch.contiguous_format) if out is None else out
    if resolve_backend(backend, first, {"triton": _triton_limit(first, plan)}) == "triton":
        from dit_accel.kernels._triton.forecast import weighted_sum_into

        weighted_sum_into(history, weights, plan, out)
    elif plan is None:
        out.copy_(_sum_reference(history, weights))
    else:
        for region in regions(plan, computed=False):
            rows = [region.read(features) for features in history]
            out[region.batch][region.index] = _sum_reference(rows, weights).to(out.dtype)
    return out


def _triton_limit(first: torch.Tensor, plan: AttentionPlan | None) -> str | None:
    """Return why the Triton kernel does not support these features, or None."""
    if first.dtype == torch.float64:
        return "it sums in float32, got float64"
    fits = plan is None or plan.block in BLOCK_SIZES
    return None if fits else f"plan.block must be one of {BLOCK_SIZES}, got {plan.block}"


def _sum_reference(history: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    total = history[0].to(torch.promote_types(history[0].dtype, torch.float32)) * weights[0]
    for features, weight in zip(history[1:], weights[1:], strict=True):
        total.add_(features, alpha=weight)
    return total


def _require_arguments(history, weights, plan, out) -> None:
    if not len(history) or len(history) != len(weights):
        raise ShapeError(f"history and weights must have one length, at least 1, got {len(history)} and {len(weights)}")
    first = history[0]
    if first.dtype not in DTYPES:
        checks.require_dtype("history[0]", first, DTYPES)
    for index, features in enumerate(history):
        fits = type(features) is torch.Tensor and features.shape == first.shape
        if not fits or features.dtype != first.dtype or features.device != first.device:
            checks.require_shape(f"history[{index}]", features, tuple(first.shape))
            checks.require_same(f"history[{index}]", features, "history[0]", first)
    if out is not None:
        checks.require_shape("out", out, tuple(first.shape))
        checks.require_same("out", out, "history[0]", first)
    if plan is not None:
        checks.require_shape("history[0]", first, ("B", plan.tokens, plan.heads, "D"))
        checks.require_plan(plan, "history[0]", first)
        if out is None:
            raise ShapeError("out must be given with a plan, because rows that compute keep their values; got None")
        checks.require_unit_stride("out", out)
