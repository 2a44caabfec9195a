"""Linear attention over the marginal tiles of a plan (SLA, section 4.2, equation 5), and its gradients (equation 8).

With features ``phi`` and the row's marginal key blocks J_i:

    h_j = phi(K_j)^T V_j      H_i = sum over J_i of h_j      O_i = phi(Q_i) H_i / (phi(Q_i) Z_i)
    z_j = sum of phi(K_j)     Z_i = sum over J_i of z_j

Each h_j is computed once. All sums H of a head are one product of its 0/1 matrix of marginal tiles with its h, whose
cost does not depend on the number of marginal tiles.

For a row with features A = phi(Q_i), s = A Z_i, output O = A H_i / s and the gradient dO of O:

    dN = dO / s                  dA   = dN H_i^T + ds Z_i^T     dH_i = A^T dN     dZ_i = A^T ds
    ds = -rowsum(dO * O) / s

A key block gets dh_j and dz_j, the sums of dH_i and dZ_i over all rows in which it is marginal:

    dV_j = phi(K_j) dh_j         dphi(K_j) = V_j dh_j^T + 1 dz_j^T

The derivative of phi then gives dQ and dK. No gradient flows through the choice of the tiles. Only q, k and v are kept
from the forward: H and Z are computed again, which costs little time and saves their memory.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import custom_op, like
from dit_accel.kernels.packing import unpack_bits
from dit_accel.kernels.plans.regions import computing_rows
from dit_accel.kernels.symbols import AttentionPlan

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FEATURE_MAPS = ("softmax", "elu", "relu")


@custom_op(like("q"), writes=["out"])
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    *,
    feature_map: str = "softmax",
    projection: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Linear attention ``O^l`` over the marginal tiles of a plan. Forward only: no gradient flows.

    Sums are in float32. bfloat16 inputs are multiplied in it, with each h_j and H_i rounded once; others in float32.

    Args:
        q, k, v: ``[B, S, H, D]``, float16, bfloat16 or float32; any strides, the last being 1.
        plan: rows that compute, and their marginal tiles in ``linear_bits``, for B, H and S tokens.
        feature_map: "softmax" over the head dimension, "elu" (elu + 1) or "relu".
        projection: ``[D, D]``, any floating dtype; the result is ``O^l projection^T`` (SLA, equation 6). None = O^l.
        kv_len: int32 ``[B]``, valid keys of each sample; later keys are ignored. None = all.
        out: ``[B, S, H, D]`` like q, written in place. Rows that do not compute keep their values; with None it is
            allocated **uninitialised**, so they hold garbage.
        accumulate: add the result to ``out``.

    Returns:
        ``out``, which is 0 for a computing query whose row has no marginal tile, or whose products with phi are all 0.
    """
    _require_arguments(q, k, v, plan, feature_map, kv_len)
    if accumulate and out is None:
        raise ShapeError("accumulate adds to out, and out is None; pass out")
    checks.require_like("q", q, tuple(q.shape), out=out)
    if projection is not None:
        checks.require_shape("projection", projection, (q.shape[-1], q.shape[-1]))
        projection = projection.to(q.device, q.dtype).contiguous()
    chosen = resolve_backend(backend, q, {"triton": checks.triton_limit(q.shape[-1], plan)})
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    kv_len = None if kv_len is None else kv_len.contiguous()  # kernels read it by address
    if chosen == "triton":
        from dit_accel.kernels._triton.linear_attention import linear_attention_into

        linear_attention_into(q, k, v, plan, feature_map, projection, kv_len, out, accumulate)
        return out
    features = _map_features(_by_block(q, plan), feature_map)  # [B, H, T, block, D]
    key_features, values = _keys_and_values(k, v, plan, feature_map, kv_len)
    sums, feature_sums = _row_sums(key_features, values, _marginal_tiles(plan).float())
    numerator, denominator = features @ sums, features @ feature_sums[..., None]
    result = torch.where(denominator > 0, numerator / denominator, 0.0)  # [B, H, T, block, D]
    result = result.flatten(2, 3)[:, :, : plan.tokens].transpose(1, 2)
    if projection is not None:
        result = result @ projection.float().T
    if accumulate:
        result = result + out
    by_token = computing_rows(plan).repeat_interleave(plan.block, 2)[:, :, : plan.tokens].transpose(1, 2)
    out.copy_(torch.where(by_token[..., None], result.to(out.dtype), out))
    return out


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
    _require_arguments(q, k, v, plan, feature_map, kv_len)
    checks.require_like("q", q, tuple(q.shape), do=do)
    chosen = resolve_backend(backend, q, {"triton": checks.triton_limit(q.shape[-1], plan)})
    kv_len = None if kv_len is None else kv_len.contiguous()  # kernels read it by address
    if chosen == "triton":
        from dit_accel.kernels._triton.linear_attention import linear_attention_backward as implementation
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
    """Linear attention ``O^l`` with gradients for q, k and v, once; rows that do not compute are 0, as theirs."""
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


def _require_arguments(q, k, v, plan, feature_map, kv_len) -> None:
    checks.require_floats("q", q, ("B", "S", "H", "D"))
    checks.require_like("q", q, tuple(q.shape), k=k, v=v)
    checks.require_whole_plan(plan, q)
    if plan.linear_bits is None:
        raise ShapeError("plan must have linear_bits, got None; lower symbols of policy sla")
    if feature_map not in FEATURE_MAPS:
        raise ShapeError(f"feature_map must be one of {FEATURE_MAPS}, got {feature_map!r}")
    checks.require_typed("q", q, (q.shape[0],), torch.int32, kv_len=kv_len)


def _row_sums(key_features, values, marginal) -> tuple[torch.Tensor, torch.Tensor]:
    """Return H ``[B, H, T, D, D]`` and Z ``[B, H, T, D]`` of each row."""
    states = (key_features.transpose(-1, -2) @ values).flatten(3)  # h, [B, H, T, D * D]
    return (marginal @ states).unflatten(3, (values.shape[-1], -1)), marginal @ key_features.sum(3)


def _keys_and_values(k, v, plan, feature_map, kv_len) -> tuple[torch.Tensor, torch.Tensor]:
    """``phi(K)`` and V as float32 ``[B, H, T, block, D]``, 0 where a key is not valid."""
    padded = plan.blocks * plan.block
    length = torch.full((plan.batch,), plan.tokens, device=k.device) if kv_len is None else kv_len.clamp(0, plan.tokens)
    is_valid = torch.arange(padded, device=k.device) < length[:, None]
    is_valid = is_valid.view(plan.batch, 1, plan.blocks, plan.block, 1)
    features = _map_features(_by_block(k, plan), feature_map)
    return torch.where(is_valid, features, 0.0), torch.where(is_valid, _by_block(v, plan), 0.0)


def _by_block(x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """``[B, S, H, D]`` -> float32 ``[B, H, T, block, D]``, padded with zeros."""
    padded = F.pad(x.float(), (0, 0, 0, 0, 0, plan.blocks * plan.block - plan.tokens))
    return padded.transpose(1, 2).unflatten(2, (plan.blocks, plan.block))


def _map_features(x: torch.Tensor, feature_map: str) -> torch.Tensor:
    """phi of float32 ``[..., D]``."""
    if feature_map == "softmax":
        return x.softmax(-1)
    return F.elu(x) + 1 if feature_map == "elu" else F.relu(x)


def _marginal_tiles(plan: AttentionPlan) -> torch.Tensor:
    """Marginal tiles of the rows that compute: bool ``[B, H, Tq, Tk]``."""
    return unpack_bits(plan.linear_bits, plan.blocks) & computing_rows(plan)[..., None]


def _backward_reference(q, k, v, do, plan, feature_map, kv_len) -> Gradients:
    """Compute the formulas above in float32 for all rows at once; axes as in linear_attention's reference."""
    inputs = _by_block(q, plan)
    features, do = _map_features(inputs, feature_map), _by_block(do, plan)
    key_features, values = _keys_and_values(k, v, plan, feature_map, kv_len)
    marginal, head_dim = _marginal_tiles(plan).float(), q.shape[-1]
    has_tiles = marginal.any(-1)[..., None, None]
    features, do = (torch.where(has_tiles, x, 0.0) for x in (features, do))  # no product: other rows may hold NaN
    sums, feature_sums = _row_sums(key_features, values, marginal)

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
    dk = _features_backward(d_key_features, _by_block(k, plan), key_features, feature_map)
    found = (x.flatten(2, 3)[:, :, : plan.tokens].transpose(1, 2) for x in (dq, dk, d_values))
    return tuple(x.to(q.dtype).contiguous() for x in found)


def _features_backward(gradient, inputs, features, feature_map: str) -> torch.Tensor:
    """Gradient of phi's input; features that were set to 0 pass no gradient on."""
    if feature_map == "softmax":
        return features * (gradient - (features * gradient).sum(-1, keepdim=True))
    return gradient * (features.clamp(max=1) if feature_map == "elu" else (features > 0).float())
