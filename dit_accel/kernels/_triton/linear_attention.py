"""Linear attention over marginal tiles, in groups of heads whose states fit ``GROUP_BYTES``. For each group:

1. one program per (key block, head): ``h_j = phi(K_j)^T V_j`` and ``z_j``, the sum of phi(K_j);
2. the marginal tiles as a 0/1 matrix M, unpacked from their bits;
3. ``H = M h``, one batched product over T and D², by torch (cuBLAS), with most of the work. M is exact in any dtype, so
   h is rounded once, sums are float32, and H is rounded once;
4. ``Z = M z`` in float32, made of two TF32 products, because the output is divided by it;
5. one program for ``TOKENS`` queries of a row that computes: ``phi(Q) H / (phi(Q) Z)``, and the projection.

Neighbouring programs of steps 1 and 5 take neighbouring heads, which are adjacent in memory. Gradients, for each group:

1. H and Z again, as in the forward pass;
2. one program per row: from H, Z, q and dO its dQ, and its ``dH_i = phi(Q_i)^T dN_i`` and ``dZ_i``;
3. ``dh = M^T dH``, one batched product by torch (cuBLAS), and ``dz = M^T dZ`` in float32;
4. one program per key block: from dh, dz, k and v its dK and dV.

A constant added to all values of a head changes neither dQ nor dK. But if values have a mean, it dominates H: over 32K
keys it is 180 times the part that determines dQ. So the mean is subtracted from the values before anything is rounded.
Each result has one writer, so runs repeat bit by bit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.configs import config
from dit_accel.kernels._triton.launch import key_end_of, on_device
from dit_accel.kernels._triton.packing import unpack_bits
from dit_accel.kernels.symbols import AttentionPlan

GROUP_BYTES = 2**29
SUM_ROWS, SUM_COLUMNS = 32, 64


@triton.jit
def map_features(x, FEATURES: tl.constexpr):
    """phi of float32 ``[tokens, head_dim]``."""
    if FEATURES == "softmax":
        exponential = tl.exp(x - tl.max(x, 1)[:, None])
        return exponential / tl.sum(exponential, 1)[:, None]
    if FEATURES == "elu":
        return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    return tl.maximum(x, 0.0)


@triton.jit
def _token_pointers(x, strides, batch, head, first_token, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr):
    base = x + batch * strides[0] + first_token * strides[1] + head * strides[2]
    return base + tl.arange(0, TOKENS)[:, None] * strides[1] + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def load_tokens(x, strides, batch, head, first_token, stop_token, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load float32 ``[TOKENS, HEAD_DIM]`` of ``[B, S, H, D]``, 0 from ``stop_token`` on; also return valid tokens."""
    is_valid = tl.arange(0, TOKENS)[:, None] < stop_token - first_token
    pointers = _token_pointers(x, strides, batch, head, first_token, TOKENS, HEAD_DIM)
    return tl.load(pointers, is_valid, other=0.0).to(tl.float32), is_valid


@triton.jit
def store_tokens(x, strides, batch, head, first_token, tokens, values, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr):
    is_valid = tl.arange(0, TOKENS)[:, None] < tokens - first_token
    pointers = _token_pointers(x, strides, batch, head, first_token, TOKENS, HEAD_DIM)
    tl.store(pointers, values.to(x.dtype.element_ty), is_valid)


@triton.jit
def load_values(
    v, shared_value, strides, batch, head, heads, first_token, stop_token,
    HAS_SHARED: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Load values like :func:`load_tokens`, and subtract the value that the head's keys share."""
    value, is_valid = load_tokens(v, strides, batch, head, first_token, stop_token, TOKENS, HEAD_DIM)
    if HAS_SHARED:
        shared = tl.load(shared_value + (batch * heads + head) * HEAD_DIM + tl.arange(0, HEAD_DIM))
        value = tl.where(is_valid, value - shared[None, :], 0.0)
    return value


@triton.jit
def as_operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Convert ``x`` to an operand of products. TF32 units truncate 13 bits, which biases sums, so round them before."""
    operand = x.to(DTYPE)
    if operand.dtype == tl.float32 and PRECISION == "tf32":
        operand = ((operand.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)
    return operand


@triton.jit
def load_state(states, slot, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Load a state ``[HEAD_DIM, HEAD_DIM]``, features by values, as an operand."""
    dim = tl.arange(0, HEAD_DIM)
    state = tl.load(states + slot * HEAD_DIM * HEAD_DIM + dim[:, None] * HEAD_DIM + dim[None, :])
    return as_operand(state, states.dtype.element_ty, PRECISION)


@triton.jit
def store_state(states, slot, values, HEAD_DIM: tl.constexpr):
    dim = tl.arange(0, HEAD_DIM)
    pointers = states + slot * HEAD_DIM * HEAD_DIM + dim[:, None] * HEAD_DIM + dim[None, :]
    tl.store(pointers, values.to(states.dtype.element_ty))


@triton.jit
def _block_states(
    k, v, shared_value, kv_len, states, feature_sums, k_strides, v_strides, tokens, heads, blocks,
    HAS_SHARED: tl.constexpr, HAS_LENGTHS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # (b * blocks + j) * heads + h
    head = program % heads
    block = program // heads % blocks  # may be beyond the last block: its state is 0
    batch = program // heads // blocks
    stop = key_end_of(kv_len, batch, tokens, HAS_LENGTHS)
    dim = tl.arange(0, HEAD_DIM)
    state = tl.zeros([HEAD_DIM, HEAD_DIM], tl.float32)
    feature_sum = tl.zeros([HEAD_DIM], tl.float32)
    for part in tl.range(BLOCK // TOKENS, num_stages=1):
        first_token = block * BLOCK + part * TOKENS
        key, is_valid = load_tokens(k, k_strides, batch, head, first_token, stop, TOKENS, HEAD_DIM)
        value = load_values(
            v, shared_value, v_strides, batch, head, heads, first_token, stop, HAS_SHARED, TOKENS, HEAD_DIM
        )
        features = as_operand(tl.where(is_valid, map_features(key, FEATURES), 0.0), states.dtype.element_ty, PRECISION)
        value = as_operand(value, states.dtype.element_ty, PRECISION)
        state = tl.dot(tl.trans(features), value, state, input_precision=PRECISION)
        feature_sum += tl.sum(features.to(tl.float32), 0)
    slot = (batch * heads + head) * blocks + block
    store_state(states, slot, state, HEAD_DIM)
    tl.store(feature_sums + slot * HEAD_DIM + dim, feature_sum)


@triton.jit
def _sum_features(
    marginal, feature_sums, out, row_stride, column_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)  # of all batches
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    total = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        pointers = marginal + head * rows * columns + row * row_stride + column[None, :] * column_stride
        weights = tl.load(pointers, (row < rows) & (column < columns)[None, :], other=0.0).to(tl.float32)
        pointers = feature_sums + (head * columns + column)[:, None] * HEAD_DIM + dim
        value = tl.load(pointers, (column < columns)[:, None], other=0.0)
        high = (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # the bits that TF32 holds
        total = tl.dot(weights, high, total, input_precision="tf32")
        total = tl.dot(weights, value - high, total, input_precision="tf32")
    tl.store(out + (head * rows + row) * HEAD_DIM + dim, total, row < rows)


@triton.jit
def row_computes(mask64, batch, row, head, rows):
    return (tl.load(mask64 + batch * rows + row) >> head & 1) == 1


@triton.jit
def _outputs(
    q, sums, feature_sums, mask64, projection, out, q_strides, out_strides, tokens, first_head, heads, rows,
    HAS_PROJECTION: tl.constexpr, ACCUMULATES: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # (b * parts + part) * heads + h
    head = program % heads
    parts = rows * (BLOCK // TOKENS)
    first_token = program // heads % parts * TOKENS
    batch = program // heads // parts
    row = first_token // BLOCK
    if not row_computes(mask64, batch, row, first_head + head, rows):
        return
    # all loads come before all computations, so that they overlap
    query, _ = load_tokens(q, q_strides, batch, head, first_token, tokens, TOKENS, HEAD_DIM)
    slot = (batch * heads + head) * rows + row
    state = load_state(sums, slot, HEAD_DIM, PRECISION)
    dim = tl.arange(0, HEAD_DIM)
    feature_sum = tl.load(feature_sums + slot * HEAD_DIM + dim)
    if ACCUMULATES:
        held, _ = load_tokens(out, out_strides, batch, head, first_token, tokens, TOKENS, HEAD_DIM)
    if HAS_PROJECTION:
        weight = tl.load(projection + dim[:, None] * HEAD_DIM + dim[None, :]).to(state.dtype)  # [to, from]
    features = as_operand(map_features(query, FEATURES), state.dtype, PRECISION)
    numerator = tl.dot(features, state, input_precision=PRECISION)
    denominator = tl.sum(features.to(tl.float32) * feature_sum[None, :], 1)
    result = numerator * tl.where(denominator > 0, 1.0 / denominator, 0.0)[:, None]
    if HAS_PROJECTION:
        result = tl.dot(as_operand(result, state.dtype, PRECISION), tl.trans(weight), input_precision=PRECISION)
    if ACCUMULATES:
        result += held
    store_tokens(out, out_strides, batch, head, first_token, tokens, result, TOKENS, HEAD_DIM)


class RowSums(NamedTuple):
    """Sums over the marginal tiles of the rows of G heads; T rows and C columns, a multiple of 8."""

    marginal: torch.Tensor  # [B * G, T, C], the 0/1 matrix of these tiles, in the dtype of products
    sums: torch.Tensor  # H, [B * G, T, D, D], in the dtype of products
    feature_sums: torch.Tensor  # Z, float32 [B * G, T, D]


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of products; not float16, which would overflow: sums over 32K keys reach 32K times a value."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def products(x: torch.Tensor, part: str) -> dict[str, int | str]:
    """Constants of the products of a part. float16 uses TF32, which has as many mantissa bits."""
    if x.dtype == torch.bfloat16:
        return {"TOKENS": 64, "PRECISION": "tf32"} | config(f"linear attention, {part}", x)
    return {"TOKENS": 32, "PRECISION": "tf32" if x.dtype == torch.float16 else "ieee", "num_warps": 8}


def head_groups(q: torch.Tensor, plan: AttentionPlan) -> Iterator[slice]:
    """Yield groups of at least one head whose states, one per key block, take at most ``GROUP_BYTES``."""
    head_bytes = plan.batch * plan.blocks * q.shape[-1] ** 2 * product_dtype(q).itemsize
    size = max(GROUP_BYTES // head_bytes, 1)
    for first in range(0, plan.heads, size):
        yield slice(first, min(first + size, plan.heads))


def sum_states(k, v, plan, group, feature_map, kv_len, shared_value=None) -> RowSums:
    """Run steps 1 to 4 for ``[B, S, G, D]`` of a group of heads, minus ``shared_value`` ``[B, G, D]`` of each head."""
    batch, tokens, heads, head_dim = k.shape
    dtype = product_dtype(k)
    bits = plan.linear_bits[:, group]
    columns = bits.shape[-1] * 8  # whole bytes, because cuBLAS needs rows of 16 bytes
    marginal = unpack_bits(bits.contiguous(), columns).to(dtype).flatten(0, 1)
    states = k.new_empty(batch * heads, columns, head_dim * head_dim, dtype=dtype)
    feature_sums = k.new_empty(batch * heads, columns, head_dim, dtype=torch.float32)
    with on_device(k):
        _block_states[(batch * columns * heads,)](
            k, v, shared_value, kv_len, states, feature_sums, k.stride()[:3], v.stride()[:3], tokens, heads, columns,
            HAS_SHARED=shared_value is not None, HAS_LENGTHS=kv_len is not None, FEATURES=feature_map,
            BLOCK=plan.block, HEAD_DIM=head_dim, **products(k, f"states, blocks of {plan.block}"),
        )  # fmt: skip
    sums = torch.bmm(marginal, states).unflatten(-1, (head_dim, head_dim))
    return RowSums(marginal, sums, sum_features(marginal, feature_sums))


def sum_features(marginal: torch.Tensor, feature_sums: torch.Tensor) -> torch.Tensor:
    """``marginal @ feature_sums``: ``[N, rows, columns]``, which may be transposed, by float32 ``[N, columns, D]``."""
    rows, columns = marginal.shape[1:]
    out = feature_sums.new_empty(len(marginal), rows, feature_sums.shape[-1])
    with on_device(out):
        _sum_features[(triton.cdiv(rows, SUM_ROWS), len(marginal))](
            marginal, feature_sums, out, marginal.stride(1), marginal.stride(2), rows, columns,
            ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, HEAD_DIM=out.shape[-1],
        )  # fmt: skip
    return out


def linear_attention_into(q, k, v, plan, feature_map, projection, kv_len, out, accumulate) -> None:
    batch, tokens, _, head_dim = q.shape
    for group in head_groups(q, plan):
        row_sums = sum_states(k[:, :, group], v[:, :, group], plan, group, feature_map, kv_len)
        heads, options = group.stop - group.start, products(q, "outputs")
        with on_device(q):
            _outputs[(batch * plan.blocks * (plan.block // options["TOKENS"]) * heads,)](
                q[:, :, group], row_sums.sums, row_sums.feature_sums, plan.mask64, projection, out[:, :, group],
                q.stride()[:3], out.stride()[:3], tokens, group.start, heads, plan.blocks,
                HAS_PROJECTION=projection is not None, ACCUMULATES=accumulate, FEATURES=feature_map,
                BLOCK=plan.block, HEAD_DIM=head_dim, **options,
            )  # fmt: skip


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


def linear_attention_backward(q, k, v, do, plan, feature_map, kv_len) -> tuple[torch.Tensor, ...]:
    batch, tokens, _, head_dim = q.shape
    dq, dk, dv = (torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(3))
    means = _mean_values(v, kv_len)
    for group in head_groups(q, plan):
        heads, options = group.stop - group.start, products(q, "gradients")
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
