"""Gradients of linear attention over the marginal tiles of a plan (SLA, equation 8), and the differentiable op.

For a row with features A = phi(Q_i), s = A Z_i, output O = A H_i / s and the gradient dO of O:

    dN = dO / s                  dA   = dN H_i^T + ds Z_i^T     dH_i = A^T dN     dZ_i = A^T ds
    ds = -rowsum(dO * O) / s

A key block gets dh_j and dz_j, the sums of dH_i and dZ_i over all rows in which it is marginal:

    dV_j = phi(K_j) dh_j         dphi(K_j) = V_j dh_j^T + 1 dz_j^T

The derivative of phi then gives dQ and dK. No gradient flows through the choice of the tiles. Only q, k and v are kept
from the forward: H and Z are computed again, which costs little time and saves their memory.
"""

import torch

from dit_accel.kernels import checks
from dit_accel.kernels.attention.linear_attention import (
    by_block,
    keys_and_values,
    linear_attention,
    map_features,
    marginal_tiles,
    require_linear_arguments,
    row_sums,
)
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import custom_op, like
from dit_accel.kernels.symbols import AttentionPlan

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@custom_op(like("q", "q", "q"))
def linear_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    plan: AttentionPlan,
    *,
    feature_map: str = "softmax",
    kv_len: torch.Tensor | None = None,
    backend: str = "auto",
) -> Gradients:
    """Gradients of ``linear_attention(q, k, v, plan, feature_map=feature_map, kv_len=kv_len)`` for q, k and v.

    Args:
        do: ``[B, S, H, D]`` like q, gradient of its output. Rows that do not compute may hold anything.

    Returns:
        dq, dk, dv: ``[B, S, H, D]`` in q's dtype, contiguous. Rows that do not compute, or whose output is 0 for lack
        of features, have dq 0 and add nothing to dk and dv; keys that are marginal to no row have dk and dv 0.
    """
    require_linear_arguments(q, k, v, plan, feature_map, kv_len)
    checks.require_like("q", q, tuple(q.shape), do=do)
    chosen = resolve_backend(backend, q, {"triton": checks.triton_limit(q.shape[-1], plan)})
    kv_len = None if kv_len is None else kv_len.contiguous()  # kernels read it by address
    if chosen == "triton":
        from dit_accel.kernels._triton.linear_attention_backward import linear_attention_backward as implementation
    else:
        implementation = _backward_reference
    return implementation(q, k, v, do, plan, feature_map, kv_len)


def differentiable_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    *,
    feature_map: str = "softmax",
    kv_len: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Linear attention ``O^l`` with gradients for q, k and v (no second derivatives).

    Rows that do not compute are 0, and no gradient flows from them.
    """
    return _LinearAttention.apply(q, k, v, plan, feature_map, kv_len, backend)


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, feature_map, kv_len, backend):
        ctx.save_for_backward(q, k, v)
        ctx.plan = plan
        ctx.options = {"feature_map": feature_map, "kv_len": kv_len, "backend": backend}
        return linear_attention(q, k, v, plan, out=q.new_zeros(q.shape), **ctx.options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        do = do if do.stride(-1) == 1 else do.contiguous()  # the gradient of a sum has stride 0
        return *linear_attention_backward(*ctx.saved_tensors, do, ctx.plan, **ctx.options), None, None, None, None


def _backward_reference(q, k, v, do, plan, feature_map, kv_len) -> Gradients:
    """Compute the formulas above in float32 for all rows at once; axes as in linear_attention's reference."""
    inputs = by_block(q, plan)
    features, do = map_features(inputs, feature_map), by_block(do, plan)
    key_features, values = keys_and_values(k, v, plan, feature_map, kv_len)
    marginal, head_dim = marginal_tiles(plan).float(), q.shape[-1]
    has_tiles = marginal.any(-1)[..., None, None]
    features, do = (torch.where(has_tiles, x, 0.0) for x in (features, do))  # no product: other rows may hold NaN
    sums, feature_sums = row_sums(key_features, values, marginal)

    denominator = features @ feature_sums[..., None]
    inverse = torch.where(denominator > 0, 1 / denominator, 0.0)
    d_numerator = do * inverse
    d_denominator = -(do * (features @ sums) * inverse).sum(-1, keepdim=True) * inverse
    d_features = d_numerator @ sums.transpose(-1, -2) + d_denominator * feature_sums[..., None, :]
    d_sums = (features.transpose(-1, -2) @ d_numerator).flatten(3)
    d_feature_sums = (features * d_denominator).sum(3)

    d_states = (marginal.transpose(-1, -2) @ d_sums).unflatten(3, (head_dim, -1))
    d_state_features = (marginal.transpose(-1, -2) @ d_feature_sums)[..., None, :]
    d_values = key_features @ d_states
    d_key_features = values @ d_states.transpose(-1, -2) + d_state_features
    dq = _features_backward(d_features, inputs, features, feature_map)
    dk = _features_backward(d_key_features, by_block(k, plan), key_features, feature_map)
    return tuple(
        x.flatten(2, 3)[:, :, : plan.tokens].transpose(1, 2).to(q.dtype).contiguous() for x in (dq, dk, d_values)
    )


def _features_backward(gradient, inputs, features, feature_map: str) -> torch.Tensor:
    """Gradient of phi's input; features that were set to 0 pass no gradient on."""
    if feature_map == "softmax":
        return features * (gradient - (features * gradient).sum(-1, keepdim=True))
    slope = features.clamp(max=1) if feature_map == "elu" else (features > 0).float()
    return gradient * slope
