"""Attention over int8 queries and keys, optionally with float8 values.

A score is ``c * (int8 product + float16 product)``. c is the product of a query's scale (including the scale of the
scores and log2(e)) and a key block's scale. The int8 product is converted to float32, and the matrix unit adds the
float16 product of the 16 exact channels. Ignored keys have -inf in an exact channel, so no tile needs a mask.

With ``pv_threshold`` the rows of a program decide together, and a step is a whole tile.

In float8, probabilities and their sum are multiplied by 256, because e4m3 only goes down to 2^-9. ``operand_order``
permutes keys so that the registers of the scores are the operand of the next product.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dit_accel.kernels._triton.attention_steps import LN_2, is_negligible, visits_of_row
from dit_accel.kernels._triton.configs import architecture, config
from dit_accel.kernels._triton.launch import key_end_of, on_device, precision
from dit_accel.kernels._triton.quantize import SLOTS, ValueMatrix, copy_values, quantize
from dit_accel.kernels.constants import LOG2_E

LOWEST = tl.constexpr(-1e30)  # replaces -inf, because the difference of two -inf is NaN
FP8_SHIFT = tl.constexpr(8.0)  # log2 of the factor of float8 probabilities
TMA_ALIGNMENT = 16  # bytes


@triton.jit
def _in_operand_order(probabilities):
    """Reorder columns of scores like the values; takes no instruction, only reinterprets the registers."""
    queries: tl.constexpr = probabilities.shape[0]
    keys: tl.constexpr = probabilities.shape[1]
    octets = tl.reshape(probabilities, [queries, keys // 16, 2, 4, 2])
    return tl.reshape(tl.permute(octets, [0, 1, 3, 2, 4]), [queries, keys])


@triton.jit
def _tile(matrix, row, column, row_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_DESCRIPTOR: tl.constexpr):
    if BY_DESCRIPTOR:
        tile = matrix.load([row, column])
    else:  # Triton also compiles what follows a return: a descriptor has no address
        of_row = matrix + (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * row_stride
        tile = tl.load(of_row + column + tl.arange(0, COLUMNS)[None, :])
    return tile


@triton.jit
def _attention_int8(
    key_tiles, exact_tiles, value_tiles, queries, exact_queries, query_scale, shift, key_scale, value_scale, out, lse,
    work, work_count, kv_count, kv_index, kv_len, v_row, v_batch, v_head, v_column, out_batch, out_token, out_head,
    heads, group, blocks, tokens, pv_threshold_log2,
    HAS_KV_LEN: tl.constexpr, LIST: tl.constexpr, HAS_PV_THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_TILE: tl.constexpr, SLOTS: tl.constexpr,
    FP8: tl.constexpr, HAS_LSE: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = BLOCK // ROWS
    TILES: tl.constexpr = BLOCK // KEY_TILE
    FACTOR: tl.constexpr = FP8_SHIFT if FP8 else 0.0
    item = tl.program_id(0)
    if item >= tl.load(work_count) * PARTS:
        return
    row = tl.load(work + item // PARTS)  # (b * H + h) * Tq + i
    head = row // blocks % heads
    batch = row // blocks // heads
    kv_head = batch * (heads // group) + head // group
    place = row.to(tl.int64) * BLOCK + item % PARTS * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    query = tl.load(queries + place[:, None] * HEAD_DIM + dim[None, :])  # [rows, head_dim]
    exact_query = tl.load(exact_queries + place[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :])  # [rows, 16]
    of_query = tl.load(query_scale + place)

    token = row % blocks * BLOCK + item % PARTS * ROWS + tl.arange(0, ROWS)
    steps = tl.load(kv_count + row) * TILES
    key_blocks = kv_index + row.to(tl.int64) * blocks
    if HAS_PV_THRESHOLD:  # it needs the last tile with a key; otherwise tiles without keys need no special case
        key_end = key_end_of(kv_len, batch, tokens, HAS_KV_LEN)
        _, _, steps, _ = visits_of_row(
            kv_count, kv_count, key_blocks, row, blocks, key_end, BLOCK, LIST, HAS_KV_LEN, HAS_MASKS=False
        )
    running_max = tl.full([ROWS], LOWEST, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    next_block = tl.load(key_blocks)
    for step in tl.range(0, steps, num_stages=STAGES):
        block = next_block
        # one step ahead: otherwise it would pass through shared memory, with a barrier
        next_block = tl.load(key_blocks + tl.minimum(step + 1, steps - 1) // TILES)
        first = block * BLOCK + step % TILES * KEY_TILE
        key_row = kv_head * blocks * BLOCK + first
        scale = of_query * tl.load(key_scale + kv_head * blocks + block)  # [rows]
        keys = _tile(key_tiles, key_row, 0, HEAD_DIM, KEY_TILE, HEAD_DIM, BY_DESCRIPTOR)
        exact_keys = _tile(exact_tiles, key_row, 0, SLOTS, KEY_TILE, SLOTS, BY_DESCRIPTOR)
        scores = tl.dot(exact_query, exact_keys.T, tl.dot(query, keys.T).to(tl.float32))  # [rows, key_tile]
        negligible = False
        if HAS_PV_THRESHOLD:
            negligible = (step + 1 < steps) & is_negligible(
                scores, running_max, token < tokens, scale, pv_threshold_log2
            )
        if not negligible:
            new_max = tl.maximum(running_max, tl.max(scores, 1) * scale)
            probabilities = tl.math.exp2(scores * scale[:, None] - (new_max - FACTOR)[:, None])
            decay = tl.math.exp2(running_max - new_max)
            running_sum = running_sum * decay + tl.sum(probabilities, 1)
            running_max = new_max
            acc = acc * decay[:, None]
            if FP8:
                values = _tile(value_tiles, kv_head * HEAD_DIM, first, v_row, HEAD_DIM, KEY_TILE, BY_DESCRIPTOR).T
                acc = tl.dot(_in_operand_order(probabilities.to(values.dtype)), values, acc)
            else:
                value_row = batch * v_batch + head // group * v_head + first
                value_column = head // group * v_column
                values = _tile(value_tiles, value_row, value_column, v_row, KEY_TILE, HEAD_DIM, BY_DESCRIPTOR)
                acc = tl.dot(probabilities.to(values.dtype), values, acc, input_precision=PRECISION)

    # a row without keys has sum 0: output 0, lse -inf
    result = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
    if FP8:
        of_channel = value_scale + kv_head * 2 * HEAD_DIM + dim
        mean = tl.where(running_sum[:, None] == 0.0, 0.0, tl.load(of_channel + HEAD_DIM)[None, :])
        result = result * tl.load(of_channel)[None, :] + mean
    out_row = out + batch.to(tl.int64) * out_batch + head.to(tl.int64) * out_head
    out_pointers = out_row + token.to(tl.int64)[:, None] * out_token + dim[None, :]
    tl.store(out_pointers, result.to(out.dtype.element_ty), (token < tokens)[:, None])
    if HAS_LSE:
        row_lse = (running_max + tl.math.log2(running_sum) - FACTOR) * LN_2 + tl.load(shift + place)
        tl.store(lse + (row // blocks).to(tl.int64) * tokens + token, row_lse, token < tokens)


def attend(plan, quantized, matrix, sizes, by_descriptor, out, lse, kv_len=None, pv_threshold=None) -> None:
    head_dim, key_tile, rows = out.shape[-1], sizes["KEY_TILE"], 64
    fp8 = quantized.values is not None
    key_rows = quantized.keys.numel() // head_dim
    matrices = quantized.keys, quantized.exact_keys, matrix.values
    if by_descriptor:
        matrices = (
            TensorDescriptor(quantized.keys, [key_rows, head_dim], [head_dim, 1], [key_tile, head_dim]),
            TensorDescriptor(quantized.exact_keys, [key_rows, SLOTS], [SLOTS, 1], [key_tile, SLOTS]),
            TensorDescriptor(
                matrix.values, matrix.shape, matrix.strides,
                [head_dim, key_tile] if fp8 else [key_tile, head_dim],
            ),
        )  # fmt: skip
    with on_device(out):
        _attention_int8[(plan.work.numel() * (plan.block // rows),)](
            *matrices, quantized.queries, quantized.exact_queries, quantized.query_scale, quantized.shift,
            quantized.key_scale, quantized.value_scale, out, lse,
            plan.work, plan.work_count, plan.kv_count, plan.kv_index, kv_len,
            matrix.strides[0], *matrix.first, *out.stride()[:3],
            plan.heads, plan.heads // quantized.keys.shape[1], plan.blocks, plan.tokens, (pv_threshold or 0.0) * LOG2_E,
            HAS_KV_LEN=kv_len is not None, LIST=triton.next_power_of_2(plan.blocks),
            HAS_PV_THRESHOLD=pv_threshold is not None,
            BLOCK=plan.block, ROWS=rows, HEAD_DIM=head_dim, SLOTS=SLOTS, FP8=fp8, HAS_LSE=lse is not None,
            BY_DESCRIPTOR=by_descriptor, PRECISION=precision(out), **sizes,
        )  # fmt: skip


def values_as_matrix(v, plan, kv_len, quantized, zero_fills) -> ValueMatrix:
    """Return the values if no tile reaches into other samples or beyond ``kv_len``, where they may be NaN; else a copy
    with zeros there. ``zero_fills``: reading past the end of a matrix gives zeros.
    """
    batch, tokens, kv_heads, head_dim = v.shape
    padded = plan.blocks * plan.block
    if quantized.values is not None:
        return ValueMatrix(quantized.values, [batch * kv_heads * head_dim, padded], [padded, 1], (0, 0, 0))
    of_batch, of_token, of_head, _ = v.stride()
    aligned = v.data_ptr() % TMA_ALIGNMENT == 0 and of_token * v.element_size() % TMA_ALIGNMENT == 0
    one_matrix = (kv_heads == 1 or of_head == head_dim) and (batch == 1 or of_batch == tokens * of_token)
    if kv_len is None and aligned and one_matrix and (tokens == padded or (batch == 1 and zero_fills)):
        return ValueMatrix(v, [batch * tokens, kv_heads * head_dim], [of_token, 1], (tokens, 0, head_dim))
    rows = batch * kv_heads * padded
    return ValueMatrix(copy_values(v, plan, kv_len), [rows, head_dim], [head_dim, 1], (kv_heads * padded, padded, 0))


def attention_int8_into(q, k, v, plan, scale, kv_len, pv_threshold, qk_dtype, out, lse) -> None:
    quantized = quantize(q, k, v, plan, scale, kv_len, qk_dtype, has_lse=lse is not None)
    kernel = "attention, int8" + (", pv_threshold" if pv_threshold is not None else "")
    sizes = config(kernel, q if quantized.values is None else quantized.values)
    sizes = sizes | {"KEY_TILE": min(sizes["KEY_TILE"], plan.block)}
    by_descriptor = architecture(q.device) in ("sm90", "sm100")
    matrix = values_as_matrix(v, plan, kv_len, quantized, zero_fills=by_descriptor)
    attend(plan, quantized, matrix, sizes, by_descriptor, out, lse, kv_len, pv_threshold)
