"""GEMM-O: the output projection, with a cached bias for reused heads (FlashOmni, section 3.5, observation 3).

``to_out(O) = b + sum_h O_h W_h``. UPDATE splits the sum by the new symbols and keeps its reused part for every
remembered update m, ``B_m = b + sum_{h reused} O_h(t_m) W_h``; DISPATCH computes the rest,
``out = sum_m w_m B_m + sum_{h computed} O_h W_h``. All B_m use the same symbols, lest differences mix other heads.

A remembered update's bias differs from its bias in the previous stack, ``B'``, by the heads whose symbol has changed:
``B_m = B'_{m-1} + sum_{h computed then, reused now} O_h(t_m) W_h - sum_{h reused then, computed now} O_h(t_m) W_h``.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op
from dit_accel.kernels.plans.regions import Region, regions, take
from dit_accel.kernels.symbols import AttentionPlan


@eager_op
def gemm_o_update(
    o: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: AttentionPlan,
    *,
    history: Sequence[torch.Tensor] = (),
    previous: tuple[torch.Tensor, torch.Tensor] | None = None,
    offset: int = 0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense output projection, and bias stack for the next DISPATCH steps. Forward only: no gradient flows.

    Args:
        o: attention output ``[B, S, H, D]``, float16, bfloat16 or float32, all heads computed; one stream of the joint
            sequence, any strides, the last being 1.
        weight: ``[N, H * D]`` like o; any row stride, so it may be the attention columns of a fused ``proj_out``.
        bias: ``[N]`` like o, or None.
        plan: the **new** symbols, over the joint sequence.
        history: attention outputs of earlier updates, newest first, each shaped like o.
        previous: the previous update's stack, ``[M, B, S, N]`` like o, contiguous, whose entry m belongs to
            ``history[m]``, and the ``mask64`` of its plan. Then only heads of the history whose symbol has changed are
            multiplied, and an entry is rounded once more in each update. None = all reused heads are multiplied.
        offset: token of the plan's sequence at which o begins.

    Returns:
        ``out`` ``[B, S, N]``, the dense projection, and ``stack`` ``[1 + len(history), B, S, N]``, that of o first.
    """
    _require_arguments(o, weight, plan, offset)
    checks.require_like("o", o, (weight.shape[0],), bias=bias)
    checks.require_like("o", o, tuple(o.shape), **{f"history[{m}]": entry for m, entry in enumerate(history)})
    if previous is not None:
        _require_contiguous("previous stack", previous[0], ("M", *o.shape[:2], weight.shape[0]), "o", o)
        if len(previous[0]) < len(history):
            raise ShapeError(f"previous must have as many entries as history, {len(history)}, got {len(previous[0])}")
        _require_contiguous("previous mask64", previous[1], tuple(plan.mask64.shape), "plan.mask64", plan.mask64)
    if resolve_backend(backend, o, {"triton": checks.triton_limit(o.shape[-1])}) == "reference":
        return _update_reference(o, weight, bias, plan, history, previous, offset)
    from dit_accel.kernels._triton.gemm_o import update

    return update(o, weight, bias, plan, history, previous, offset)


@eager_op
def gemm_o_dispatch(
    o: torch.Tensor,
    weight: torch.Tensor,
    plan: AttentionPlan,
    stack: torch.Tensor,
    weights: Sequence[float],
    *,
    offset: int = 0,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Output projection of the heads that compute, added to the forecast bias. Forward only: no gradient flows.

    Args:
        o: attention output ``[B, S, H, D]`` as in :func:`gemm_o_update`. Reused rows are not read.
        weight: ``[N, H * D]`` like o.
        plan: the symbols of the stack.
        stack: ``[M, B, S, N]`` like o, contiguous, from :func:`gemm_o_update`; it includes the projection's bias.
        weights: M floats, the forecast's weight of each stack entry; they sum to 1 so that the bias counts once.
        offset: token of the plan's sequence at which o begins.
        out: ``[B, S, N]`` like o, contiguous; None = allocated. Every element is written.
    """
    _require_arguments(o, weight, plan, offset)
    shape = (o.shape[0], o.shape[1], weight.shape[0])
    _require_contiguous("stack", stack, ("M", *shape), "o", o)
    if len(weights) != stack.shape[0] or not len(weights):
        raise ShapeError(f"weights must hold {stack.shape[0]} floats, one for each stack entry, got {len(weights)}")
    if out is not None:
        _require_contiguous("out", out, shape, "o", o)
    out = o.new_empty(shape) if out is None else out
    if resolve_backend(backend, o, {"triton": checks.triton_limit(o.shape[-1])}) == "triton":
        from dit_accel.kernels._triton.gemm_o import dispatch_into

        dispatch_into(o, weight, plan, stack, weights, offset, out)
        return out
    total = stack[0].float() * weights[0]
    for biases, factor in zip(stack[1:], weights[1:], strict=True):
        total.add_(biases, alpha=factor)
    for region in regions(plan, computed=True, offset=offset, length=o.shape[1]):
        total[region.batch][region.tokens] += _project(o, weight, None, region)
    return out.copy_(total)


def _update_reference(o, weight, bias, plan, history, previous, offset) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length = o.shape[:2]
    out = F.linear(o.flatten(2), weight, bias)
    stack = o.new_zeros(1 + len(history), batch, length, weight.shape[0])
    if bias is not None:
        stack += bias
    for region in regions(plan, computed=False, offset=offset, length=length):
        for entry, features in enumerate((o, *history) if previous is None else (o,)):
            stack[entry][region.batch][region.tokens] = _project(features, weight, bias, region)
    if previous is not None:
        before, mask64 = previous
        for entry, features in enumerate(history):
            stack[entry + 1] = _rebased(before[entry], features, weight, plan, mask64, offset)
    return out, stack


def _rebased(old, features, weight, plan, mask64, offset) -> torch.Tensor:
    """Convert a stack entry from ``mask64`` to the plan's symbols, in float32."""
    total = old.to(torch.float32, copy=True)
    for sign, words in ((1, mask64 & ~plan.mask64), (-1, plan.mask64 & ~mask64)):
        changed = replace(plan, mask64=words)
        for region in regions(changed, computed=True, offset=offset, length=features.shape[1]):
            total[region.batch][region.tokens] += sign * _project(features, weight, None, region)
    return total


def _project(o: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, region: Region) -> torch.Tensor:
    """Project one region: ``[tokens, N]``. All its heads go through one product and are rounded once."""
    features = take(take(o[region.batch], region.tokens), region.heads, 1).flatten(1)  # [tokens, heads * D]
    columns = take(weight.unflatten(1, o.shape[2:]), region.heads, 1).flatten(1)  # [N, heads * D]
    return F.linear(features, columns, bias)


def _require_contiguous(name, tensor, shape, other_name, other) -> None:
    checks.require_same(other_name, other, shape, **{name: tensor})
    if not tensor.is_contiguous():
        raise ShapeError(f"{name} must be contiguous, got strides {list(tensor.stride())}; call .contiguous()")


def _require_arguments(o, weight, plan, offset) -> None:
    checks.require_floats("o", o, ("B", "S", plan.heads, "D"))
    checks.require_plan(plan, "o", o)
    checks.require_stream(plan, "o", o.shape[1], offset)
    checks.require_like("o", o, ("N", o.shape[2] * o.shape[3]), weight=weight)
