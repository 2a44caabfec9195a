"""GEMM-Q: the query projection of the (row-block, head) tiles that compute (FlashOmni, section 3.5, observation 2).

``q_h = RoPE(RMSNorm(x W_h^T + b_h))``. Norm and rotation work within a token of a head: reused rows need no query.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.blocks.norm_rope import norm_rope_reference
from dit_accel.kernels.custom_ops import eager_op
from dit_accel.kernels.plans.regions import regions, take
from dit_accel.kernels.symbols import AttentionPlan


@eager_op
def gemm_q(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: AttentionPlan,
    *,
    offset: int = 0,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Project, normalise and rotate the queries that compute. Forward only: no gradient flows.

    Args:
        x: ``[B, S, C]``, float16, bfloat16 or float32; one stream of the joint sequence.
        weight: ``[H * D, C]`` like x; any row stride, so it may be a slice of a fused qkv weight.
        bias: ``[H * D]`` like x, or None.
        plan: rows that compute, over the joint sequence.
        offset: token of the plan's sequence at which x begins. Streams that share a block write their own tokens.
        norm_weight: ``[D]`` like x: per-head RMSNorm with float32 statistics; None = no norm.
        rope: ``(cos, sin)``, float32 ``[plan.tokens, D]``, indexed by token of the plan's sequence. Interleaved pairs,
            as in FLUX: ``y = x * cos + rotate(x) * sin`` with ``rotate: (x0, x1) -> (-x1, x0)``.
        out: ``[B, plan.tokens, H, D]`` like x; its tokens ``offset .. offset + S`` are written. With None, a tensor of
            x's own length ``[B, S, H, D]`` is allocated **uninitialised**.

    Returns:
        ``out``; rows that do not compute keep their values.
    """
    head_dim = _require_arguments(x, weight, bias, plan, offset, norm_weight, rope, out)
    batch, length, _ = x.shape
    result = x.new_empty(batch, length, plan.heads, head_dim) if out is None else out
    stream = result if out is None else result[:, offset : offset + length]  # [B, S, H, D], what x writes
    if resolve_backend(backend, x, {"triton": checks.triton_limit(head_dim)}) == "triton":
        from dit_accel.kernels._triton.gemm_q import gemm_q_into

        gemm_q_into(x, weight, bias, plan, offset, norm_weight, norm_eps, rope, stream)
        return result
    weight_of_head = weight.unflatten(0, (plan.heads, head_dim))
    bias_of_head = None if bias is None else bias.unflatten(0, (plan.heads, head_dim))
    for region in regions(plan, computed=True, offset=offset, length=length):
        region_bias = None if bias is None else take(bias_of_head, region.heads).flatten()
        region_weight = take(weight_of_head, region.heads).flatten(0, 1)
        query = F.linear(take(x[region.batch], region.tokens), region_weight, region_bias)
        query = query.unflatten(-1, (-1, head_dim))[None]  # [1, tokens, heads, D]
        tables = rope and tuple(take(table[offset : offset + length], region.tokens) for table in rope)
        stream[region.batch][region.target] = norm_rope_reference(query, norm_weight, tables, norm_eps)[0].to(x.dtype)
    return result


def _require_arguments(x, weight, bias, plan, offset, norm_weight, rope, out) -> int:
    """Check all arguments and return the head dimension."""
    checks.require_floats("x", x, ("B", "S", "C"))
    checks.require_plan(plan, "x", x)
    checks.require_like("x", x, ("H * D", x.shape[-1]), weight=weight)
    if weight.shape[0] == 0 or weight.shape[0] % plan.heads:
        raise ShapeError(f"weight must have a multiple of the plan's {plan.heads} heads as rows, got {weight.shape[0]}")
    head_dim = weight.shape[0] // plan.heads
    checks.require_stream(plan, "x", x.shape[1], offset)
    checks.require_like("x", x, (weight.shape[0],), bias=bias)
    checks.require_like("x", x, (head_dim,), norm_weight=norm_weight)
    checks.require_like("x", x, (x.shape[0], plan.tokens, plan.heads, head_dim), out=out)
    if rope is not None:
        if head_dim % 2:
            raise ShapeError(f"rope rotates pairs, so head_dim must be even, got {head_dim}")
        for name, table in zip(("rope cos", "rope sin"), rope, strict=True):
            checks.require_typed("x", x, (plan.tokens, head_dim), torch.float32, **{name: table})
            checks.require_unit_stride(name, table)
    return head_dim
