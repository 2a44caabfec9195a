"""Linear attention over marginal tiles, in groups of heads whose states fit ``GROUP_BYTES``. For each group:

1. one program per (key block, head): ``h_j = phi(K_j)^T V_j`` and ``z_j``, the sum of phi(K_j);
2. the marginal tiles as a 0/1 matrix M, unpacked from their bits;
3. ``H = M h``, one batched product over T and D², by torch (cuBLAS), with most of the work. M is exact in any dtype, so
   h is rounded once, sums are float32, and H is rounded once;
4. ``Z = M z`` in float32, made of two TF32 products, because the output is divided by it;
5. one program for ``TOKENS`` queries of a row that computes: ``phi(Q) H / (phi(Q) Z)``, and the projection.

Neighbouring programs of steps 1 and 5 take neighbouring heads, which are adjacent in memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import key_end_of, on_device
from dit_accel.kernels.packing import unpack_bits
from dit_accel.kernels.symbols import AttentionPlan

GROUP_BYTES = 2**29
SUM_ROWS, SUM_COLUMNS = 32, 64
SUM_WARPS = 4
# For bfloat16, by block. At least two programs fit a multiprocessor's registers: one loads while the other computes. On
# one H200 with D = 128 the states of 12 heads and 32760 tokens take 0.18 ms at blocks of 64, and 0.22 ms with 4 warps
# of 238 registers.
STATE_CONFIG = {64: {"num_warps": 4, "maxnreg": 168}, 128: {"num_warps": 8, "maxnreg": 128}}
OUTPUT_CONFIG = {"num_warps": 8, "maxnreg": 128}
FLOAT32_CONFIG = {"num_warps": 8}


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
    """Sums over the marginal tiles of the rows of G heads, with ``marginal``, the 0/1 matrix of these tiles.

    With T rows and C columns, a multiple of 8: ``marginal`` ``[B * G, T, C]`` and ``sums`` (H) ``[B * G, T, D, D]`` in
    the dtype of products, ``feature_sums`` (Z) float32 ``[B * G, T, D]``.
    """

    marginal: torch.Tensor
    sums: torch.Tensor
    feature_sums: torch.Tensor


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of products; not float16, which would overflow: sums over 32K keys reach 32K times a value."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def products(x: torch.Tensor, config: dict[str, int] = FLOAT32_CONFIG) -> dict[str, int | str]:
    """Constants of products; ``config`` applies to bfloat16.

    The number of tokens fits the shared memory of every GPU since sm80 (sm89: 99 KiB). float16 uses TF32, which has as
    many mantissa bits.
    """
    if x.dtype == torch.bfloat16:
        return {"TOKENS": 64, "PRECISION": "tf32"} | config
    return {"TOKENS": 32, "PRECISION": "tf32" if x.dtype == torch.float16 else "ieee"} | FLOAT32_CONFIG


def head_groups(q: torch.Tensor, plan: AttentionPlan) -> Iterator[slice]:
    """Yield groups of at least one head whose states, one per key block, take at most ``GROUP_BYTES``."""
    head_bytes = plan.batch * plan.blocks * q.shape[-1] ** 2 * product_dtype(q).itemsize
    size = max(GROUP_BYTES // head_bytes, 1)
    for first in range(0, plan.heads, size):
        yield slice(first, min(first + size, plan.heads))


def sum_states(k, v, plan, group, feature_map, kv_len, shared_value=None) -> RowSums:
    """Run steps 1 to 4 for keys and values ``[B, S, G, D]`` of a group of heads.

    ``shared_value``: float32 ``[B, G, D]``, subtracted from all values of a head; None = 0.
    """
    batch, tokens, heads, head_dim = k.shape
    dtype = product_dtype(k)
    bits = plan.linear_bits[:, group]
    columns = bits.shape[-1] * 8  # whole bytes, because cuBLAS needs rows of 16 bytes
    marginal = unpack_bits(bits, columns).to(dtype).flatten(0, 1)
    states = k.new_empty(batch * heads, columns, head_dim * head_dim, dtype=dtype)
    feature_sums = k.new_empty(batch * heads, columns, head_dim, dtype=torch.float32)
    with on_device(k):
        _block_states[(batch * columns * heads,)](
            k, v, shared_value, kv_len, states, feature_sums, k.stride()[:3], v.stride()[:3], tokens, heads, columns,
            HAS_SHARED=shared_value is not None, HAS_LENGTHS=kv_len is not None, FEATURES=feature_map,
            BLOCK=plan.block, HEAD_DIM=head_dim, **products(k, STATE_CONFIG[plan.block]),
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
            ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, HEAD_DIM=out.shape[-1], num_warps=SUM_WARPS,
        )  # fmt: skip
    return out


def linear_attention_into(q, k, v, plan, feature_map, projection, kv_len, out, accumulate) -> None:
    batch, tokens, _, head_dim = q.shape
    for group in head_groups(q, plan):
        row_sums = sum_states(k[:, :, group], v[:, :, group], plan, group, feature_map, kv_len)
        heads, options = group.stop - group.start, products(q, OUTPUT_CONFIG)
        with on_device(q):
            _outputs[(batch * plan.blocks * (plan.block // options["TOKENS"]) * heads,)](
                q[:, :, group], row_sums.sums, row_sums.feature_sums, plan.mask64, projection, out[:, :, group],
                q.stride()[:3], out.stride()[:3], tokens, group.start, heads, plan.blocks,
                HAS_PROJECTION=projection is not None, ACCUMULATES=accumulate, FEATURES=feature_map,
                BLOCK=plan.block, HEAD_DIM=head_dim, **options,
            )  # fmt: skip
