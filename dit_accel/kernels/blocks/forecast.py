"""Kernel of all forecasts: a weighted sum of remembered features, ``sum_m w_m F_m``.

TaylorSeer's expansion becomes such a sum when its finite differences are written out; plain reuse (FORA) is one too.
"""

from collections.abc import Sequence

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op

DTYPES = (*checks.FLOAT_DTYPES, torch.float64)  # float64 in the reference alone


@eager_op
def weighted_sum(history: Sequence[torch.Tensor], weights: Sequence[float], *, backend: str = "auto") -> torch.Tensor:
    """``sum_m weights[m] * history[m]``, summed in float32 or float64 and rounded once. Forward only: no gradient.

    ``history`` is M >= 1 tensors of one shape ``[...]``, dtype (float16, bfloat16, float32; the reference takes float64
    too) and device, or a stacked ``[M, ...]`` tensor. The result is contiguous.
    """
    _require_arguments(history, weights)
    first = history[0]
    limit = "it sums in float32, got float64" if first.dtype == torch.float64 else None
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    if resolve_backend(backend, first, {"triton": limit}) == "triton":
        from dit_accel.kernels._triton.forecast import weighted_sum_into

        weighted_sum_into(history, weights, out)
        return out
    total = first.to(torch.promote_types(first.dtype, torch.float32)) * weights[0]
    for features, weight in zip(history[1:], weights[1:], strict=True):
        total.add_(features, alpha=weight)
    return out.copy_(total)


def _require_arguments(history: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
    if not len(history) or len(history) != len(weights):
        raise ShapeError(f"history and weights must have one length, at least 1, got {len(history)} and {len(weights)}")
    first = history[0]
    if first.dtype not in DTYPES:
        checks.require_dtype("history[0]", first, DTYPES)
    for index, features in enumerate(history):
        fits = type(features) is torch.Tensor and features.shape == first.shape
        if not fits or features.dtype != first.dtype or features.device != first.device:
            checks.require_same("history[0]", first, tuple(first.shape), **{f"history[{index}]": features})
