"""Gradients of linear attention over marginal tiles, in the same groups of heads as the forward pass. For each group:

1. H and Z again, as in the forward pass;
2. one program per row: from H, Z, q and dO its dQ, and its ``dH_i = phi(Q_i)^T dN_i`` and ``dZ_i``;
3. ``dh = M^T dH``, one batched product by torch (cuBLAS), and ``dz = M^T dZ`` in float32;
4. one program per key block: from dh, dz, k and v its dK and dV.

A constant added to all values of a head changes neither dQ nor dK. But if values have a mean, it dominates H: over 32K
keys it is 180 times the part that determines dQ. So the mean is subtracted from the values before anything is rounded.
Each result has one writer, so runs repeat bit by bit.
"""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import key_end_of, on_device
from dit_accel.kernels._triton.linear_attention import (
    as_operand,
    head_groups,
    load_state,
    load_tokens,
    load_values,
    map_features,
    products,
    row_computes,
    store_state,
    store_tokens,
    sum_features,
    sum_states,
)


@triton.jit
def _features_backward(gradient, features, FEATURES: tl.constexpr):
    """Gradient of phi's input from the gradient of its result, float32 ``[tokens, head_dim]``."""
    if FEATURES == "softmax":
        return features * (gradient - tl.sum(features * gradient, 1)[:, None])
    if FEATURES == "elu":
        return gradient * tl.minimum(features, 1.0)
    return tl.where(features > 0, gradient, 0.0)


@triton.jit
def _row_gradients(
    q, do, sums, feature_sums, mask64, dq, d_sums, d_feature_sums, q_strides, do_strides, dq_strides,
    tokens, first_head, heads, rows,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # (b * rows + i) * heads + h
    head = program % heads
    row = program // heads % rows
    batch = program // heads // rows
    slot = (batch * heads + head) * rows + row
    stop = tl.where(row_computes(mask64, batch, row, first_head + head, rows), tokens, 0)  # others read 0 and give 0
    element = sums.dtype.element_ty
    dim = tl.arange(0, HEAD_DIM)
    feature_sum = tl.load(feature_sums + slot * HEAD_DIM + dim)
    d_sum = tl.zeros([HEAD_DIM, HEAD_DIM], tl.float32)
    d_feature_sum = tl.zeros([HEAD_DIM], tl.float32)
    for part in tl.range(BLOCK // TOKENS, num_stages=1):
        first_token = row * BLOCK + part * TOKENS
        query, _ = load_tokens(q, q_strides, batch, head, first_token, stop, TOKENS, HEAD_DIM)
        gradient, _ = load_tokens(do, do_strides, batch, head, first_token, stop, TOKENS, HEAD_DIM)
        exact_features = map_features(query, FEATURES)
        features = as_operand(exact_features, element, PRECISION)
        state = load_state(sums, slot, HEAD_DIM, PRECISION)
        denominator = tl.sum(features.to(tl.float32) * feature_sum[None, :], 1)
        inverse = tl.where(denominator > 0, 1.0 / denominator, 0.0)
        numerator = tl.dot(features, state, input_precision=PRECISION)
        d_denominator = -tl.sum(gradient * numerator, 1) * inverse * inverse
        d_numerator = as_operand(gradient * inverse[:, None], element, PRECISION)
        d_features = tl.dot(d_numerator, tl.trans(state), input_precision=PRECISION)
        d_features += d_denominator[:, None] * feature_sum[None, :]
        d_query = _features_backward(d_features, exact_features, FEATURES)
        store_tokens(dq, dq_strides, batch, head, first_token, tokens, d_query, TOKENS, HEAD_DIM)
        d_sum = tl.dot(tl.trans(features), d_numerator, d_sum, input_precision=PRECISION)
        d_feature_sum += tl.sum(features.to(tl.float32) * d_denominator[:, None], 0)
    store_state(d_sums, slot, d_sum, HEAD_DIM)
    tl.store(d_feature_sums + slot * HEAD_DIM + dim, d_feature_sum)


@triton.jit
def _key_gradients(
    k, v, shared_value, kv_len, d_states, d_feature_sums, dk, dv, k_strides, v_strides, dk_strides,
    tokens, heads, parts, columns,
    HAS_LENGTHS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # (b * parts + part) * heads + h
    head = program % heads
    first_token = program // heads % parts * TOKENS
    batch = program // heads // parts
    slot = (batch * heads + head) * columns + first_token // BLOCK
    stop = key_end_of(kv_len, batch, tokens, HAS_LENGTHS)
    key, is_valid = load_tokens(k, k_strides, batch, head, first_token, stop, TOKENS, HEAD_DIM)
    value = load_values(v, shared_value, v_strides, batch, head, heads, first_token, stop, True, TOKENS, HEAD_DIM)
    exact_features = tl.where(is_valid, map_features(key, FEATURES), 0.0)
    element = d_states.dtype.element_ty
    features = as_operand(exact_features, element, PRECISION)
    d_value = tl.dot(features, load_state(d_states, slot, HEAD_DIM, PRECISION), input_precision=PRECISION)
    store_tokens(dv, dk_strides, batch, head, first_token, tokens, d_value, TOKENS, HEAD_DIM)
    # loaded again in the other order: both at once would take 144 KiB in float32
    by_value = tl.trans(load_state(d_states, slot, HEAD_DIM, PRECISION))
    d_features = tl.dot(as_operand(value, element, PRECISION), by_value, input_precision=PRECISION)
    d_features += tl.load(d_feature_sums + slot * HEAD_DIM + tl.arange(0, HEAD_DIM))[None, :]
    d_key = _features_backward(d_features, exact_features, FEATURES)
    store_tokens(dk, dk_strides, batch, head, first_token, tokens, d_key, TOKENS, HEAD_DIM)


def linear_attention_backward(
    q, k, v, do, plan, feature_map, kv_len
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, tokens, _, head_dim = q.shape
    dq, dk, dv = (torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(3))
    means = _mean_values(v, kv_len)
    for group in head_groups(q, plan):
        heads, options = group.stop - group.start, products(q)
        of_group = [x[:, :, group] for x in (q, k, v, do, dq, dk, dv)]
        group_q, group_k, group_v, group_do, group_dq, group_dk, group_dv = of_group
        mean = means[:, group].contiguous()
        row_sums = sum_states(group_k, group_v, plan, group, feature_map, kv_len, mean)
        d_sums, d_feature_sums = torch.empty_like(row_sums.sums), torch.empty_like(row_sums.feature_sums)
        with on_device(q):
            _row_gradients[(batch * plan.blocks * heads,)](
                group_q, group_do, row_sums.sums, row_sums.feature_sums, plan.mask64, group_dq, d_sums, d_feature_sums,
                q.stride()[:3], do.stride()[:3], dq.stride()[:3], tokens, group.start, heads, plan.blocks,
                FEATURES=feature_map, BLOCK=plan.block, HEAD_DIM=head_dim, **options,
            )  # fmt: skip
        by_key = row_sums.marginal.transpose(1, 2)
        d_states = torch.bmm(by_key, d_sums.flatten(2))
        d_state_features = sum_features(by_key, d_feature_sums)
        parts = plan.blocks * (plan.block // options["TOKENS"])
        with on_device(q):
            _key_gradients[(batch * parts * heads,)](
                group_k, group_v, mean, kv_len, d_states, d_state_features, group_dk, group_dv,
                k.stride()[:3], v.stride()[:3], dk.stride()[:3], tokens, heads, parts, by_key.shape[1],
                HAS_LENGTHS=kv_len is not None, FEATURES=feature_map, BLOCK=plan.block,
                HEAD_DIM=head_dim, **options,
            )  # fmt: skip
    return dq, dk, dv


def _mean_values(v: torch.Tensor, kv_len: torch.Tensor | None) -> torch.Tensor:
    """Mean of the valid values ``[B, S, H, D]`` of each head: float32 ``[B, H, D]``."""
    if kv_len is None:
        return v.mean(1, dtype=torch.float32)
    is_valid = torch.arange(v.shape[1], device=v.device) < kv_len[:, None]
    total = torch.where(is_valid[..., None, None], v, 0.0).sum(1, dtype=torch.float32)
    return total / is_valid.sum(1).clamp(min=1)[:, None, None]
