"""The kernel of ``attention_int8`` for Hopper, in Gluon: one warp loads, two warpgroups of 64 queries each attend.

What it changes against the portable kernel is when things happen; the formulas are the same. A warpgroup goes through

    S_j = Q K_j (int8)    |    wait    |    S_j += exact channels    P_(j-1) V_(j-1)    |    softmax of S_j

where the last product runs under the softmax, and the other warpgroup's products under it too. Keys and values arrive
through two rings of ``STAGES`` tiles, each tile with a barrier that says it is there and one that says it is free.
Nothing asynchronous crosses the end of an iteration: the compiler would make all products wait for each other. For the
same reason probabilities are carried to the next iteration as float32.

33K tokens, 24 heads, D 128, all tiles, one H200: 686 TFLOP/s, with float8 values 769; the portable kernel at its best
578 and 654.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dit_accel.kernels._triton.launch import multiprocessors, on_device
from dit_accel.kernels._triton.quantize import SLOTS

BLOCK = 128  # queries of a row, and keys of a tile
HALF = gl.constexpr(64)  # queries of a warpgroup
STAGES = 2  # 3 gives 0.3% more with float8 values and 1.3% less without
ATTEND_REGISTERS, LOAD_REGISTERS = 240, 24  # of a thread: 2 * 128 * 240 + 128 * 24 fill a multiprocessor
LOWEST = gl.constexpr(-1e30)  # stands for -inf where a difference of two -inf would be NaN
LN_2 = gl.constexpr(0.6931471805599453)
FP8_SHIFT = gl.constexpr(8.0)  # log2 of the factor of float8 probabilities


@gluon.jit
def _stage(step, STAGES: gl.constexpr):
    """Place of a tile in its ring, and the parity of the barriers there."""
    return step % STAGES, step // STAGES % 2


@gluon.jit
def _load(
    lists, rings, key_tiles, exact_tiles, value_tiles, heads, group, blocks, v_batch, v_head, v_column,
    STAGES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """The loading warp: every tile of every row that this program attends, in order."""
    work, work_count, kv_count, kv_index = lists
    keys, exact_keys, values, keys_ready, keys_free, values_ready, values_free = rings
    BLOCK: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    step = 0
    for item in range(gl.program_id(0), gl.load(work_count), gl.num_programs(0)):
        row = gl.load(work + item)  # (b * H + h) * Tq + i
        batch = row // blocks // heads
        kv_head = row // blocks % heads // group
        of_keys = (batch * (heads // group) + kv_head) * blocks
        tiles = gl.load(kv_count + row)
        key_blocks = kv_index + row.to(gl.int64) * blocks
        next_block = gl.load(key_blocks)
        for tile in range(0, tiles):
            block = next_block
            next_block = gl.load(key_blocks + gl.minimum(tile + 1, tiles - 1))
            stage, parity = _stage(step, STAGES)
            mbarrier.wait(keys_free.index(stage), parity ^ 1)
            ready = keys_ready.index(stage)
            mbarrier.expect(ready, key_tiles.block_type.nbytes + exact_tiles.block_type.nbytes)
            first = (of_keys + block) * BLOCK
            tma.async_copy_global_to_shared(key_tiles, [first, 0], ready, keys.index(stage))
            tma.async_copy_global_to_shared(exact_tiles, [first, 0], ready, exact_keys.index(stage))
            mbarrier.wait(values_free.index(stage), parity ^ 1)
            ready = values_ready.index(stage)
            mbarrier.expect(ready, value_tiles.block_type.nbytes)
            if FP8:
                place = [of_keys // blocks * HEAD_DIM, block * BLOCK]
            else:
                place = [batch * v_batch + kv_head * v_head + block * BLOCK, kv_head * v_column]
            tma.async_copy_global_to_shared(value_tiles, place, ready, values.index(stage))
            step += 1


@gluon.jit
def _softmax(scores, running_max, running_sum, scale, FACTOR: gl.constexpr):
    """One step of the online softmax in base 2: probabilities, maximum, sum, and the factor for what was summed."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * scale)
    probabilities = gl.exp2(scores * scale[:, None] - (new_max - FACTOR)[:, None])
    decay = gl.exp2(running_max - new_max)
    return probabilities, new_max, running_sum * decay + gl.sum(probabilities, 1), decay


@gluon.jit
def _as_operand(probabilities, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Scores' registers as those of the next product's operand: none moves, in float8 thanks to ``operand_order``."""
    rounded = probabilities.to(DTYPE)
    if DTYPE.primitive_bitwidth == 8:
        QUERIES: gl.constexpr = probabilities.shape[0]
        KEYS: gl.constexpr = probabilities.shape[1]
        octets = gl.permute(gl.reshape(rounded, [QUERIES, KEYS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
        rounded = gl.reshape(octets, [QUERIES, KEYS])
    return gl.convert_layout(rounded, OPERAND, assert_trivial=True)


@gluon.jit
def _value_operand(values, stage, FP8: gl.constexpr):
    tile = values.index(stage)
    if FP8:
        tile = tile.permute((1, 0))
    return tile  # [block, head_dim]


@gluon.jit
def _attend(
    lists, rings, query_tile, exact_tile, queries, exact_queries, query_scale, shift, key_scale, value_scale, out, lse,
    out_batch, out_token, out_head, heads, group, blocks, tokens,
    PART: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: queries ``PART * 64 .. + 64`` of every row of this program."""
    work, work_count, kv_count, kv_index = lists
    keys, exact_keys, values, keys_ready, keys_free, values_ready, values_free = rings
    BLOCK: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    SLOTS: gl.constexpr = exact_keys.shape[2]
    FACTOR: gl.constexpr = FP8_SHIFT if FP8 else 0.0
    # scores of the int8 and the float16 product, and the sum over values, as the matrix unit lays them out
    INTEGER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32 if FP8 else 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4 if FP8 else 2)
    PER_QUERY: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC_PER_QUERY: gl.constexpr = gl.SliceLayout(1, ACC)
    # 16 bytes a thread, so that a warp reads or writes whole rows
    QUERY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    EXACT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    step = 0
    for item in range(gl.program_id(0), gl.load(work_count), gl.num_programs(0)):
        row = gl.load(work + item)  # (b * H + h) * Tq + i
        head = row // blocks % heads
        batch = row // blocks // heads
        kv_head = batch * (heads // group) + head // group
        place = row.to(gl.int64) * BLOCK + PART * HALF
        query_row = place + gl.arange(0, HALF, gl.SliceLayout(1, QUERY))
        exact_row = place + gl.arange(0, HALF, gl.SliceLayout(1, EXACT))
        dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, QUERY))
        slot = gl.arange(0, SLOTS, gl.SliceLayout(0, EXACT))
        query_tile.store(gl.load(queries + query_row[:, None] * HEAD_DIM + dim[None, :]))
        exact_tile.store(gl.load(exact_queries + exact_row[:, None] * SLOTS + slot[None, :]))
        fence_async_shared()
        of_query = place + gl.arange(0, HALF, PER_QUERY)
        scale = gl.load(query_scale + of_query)
        tiles = gl.load(kv_count + row)
        key_blocks = kv_index + row.to(gl.int64) * blocks
        of_keys = key_scale + kv_head * blocks
        running_max = gl.full([HALF], LOWEST, gl.float32, PER_QUERY)
        running_sum = gl.full([HALF], 0.0, gl.float32, PER_QUERY)
        acc = gl.zeros([HALF, HEAD_DIM], gl.float32, ACC)
        if tiles > 0:
            zero = gl.zeros([HALF, BLOCK], gl.int32, INTEGER)
            tile_scale = scale * gl.load(of_keys + gl.load(key_blocks))
            next_block = gl.load(key_blocks + gl.minimum(1, tiles - 1))
            stage, parity = _stage(step, STAGES)
            mbarrier.wait(keys_ready.index(stage), parity)
            products = warpgroup_mma(query_tile, keys.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(0, [products])
            scores = gl.convert_layout(products.to(gl.float32), SCORES, assert_trivial=True)
            scores = warpgroup_mma(exact_tile, exact_keys.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(keys_free.index(stage))
            probabilities, running_max, running_sum, decay = _softmax(
                scores, running_max, running_sum, tile_scale, FACTOR
            )
            for tile in range(1, tiles):
                last_stage, last_parity = stage, parity
                step += 1
                stage, parity = _stage(step, STAGES)
                tile_scale = scale * gl.load(of_keys + next_block)
                next_block = gl.load(key_blocks + gl.minimum(tile + 1, tiles - 1))
                mbarrier.wait(keys_ready.index(stage), parity)
                products = warpgroup_mma(
                    query_tile, keys.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                operand = _as_operand(probabilities, values.dtype, OPERAND)
                mbarrier.wait(values_ready.index(last_stage), last_parity)
                products = warpgroup_mma_wait(0, [products])
                scores = gl.convert_layout(products.to(gl.float32), SCORES, assert_trivial=True)
                scores = warpgroup_mma(exact_tile, exact_keys.index(stage).permute((1, 0)), scores, is_async=True)
                weighted = warpgroup_mma(operand, _value_operand(values, last_stage, FP8), acc, is_async=True)
                scores = warpgroup_mma_wait(1, [scores])
                mbarrier.arrive(keys_free.index(stage))
                probabilities, running_max, running_sum, decay = _softmax(
                    scores, running_max, running_sum, tile_scale, FACTOR
                )
                acc = warpgroup_mma_wait(0, [weighted])
                mbarrier.arrive(values_free.index(last_stage))
                acc = acc * gl.convert_layout(decay, ACC_PER_QUERY, assert_trivial=True)[:, None]
            mbarrier.wait(values_ready.index(stage), parity)
            operand = _as_operand(probabilities, values.dtype, OPERAND)
            acc = warpgroup_mma(operand, _value_operand(values, stage, FP8), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(values_free.index(stage))
            step += 1

        # a row without keys has sum 0: output 0, lse -inf
        inverse = 1.0 / gl.where(running_sum == 0.0, 1.0, running_sum)
        acc = acc * gl.convert_layout(inverse, ACC_PER_QUERY, assert_trivial=True)[:, None]
        if FP8:
            of_channel = value_scale + kv_head * 2 * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ACC))
            has_key = gl.convert_layout(running_sum, ACC_PER_QUERY, assert_trivial=True)[:, None] > 0.0
            mean = gl.where(has_key, gl.load(of_channel + HEAD_DIM)[None, :], 0.0)
            acc = acc * gl.load(of_channel)[None, :] + mean
        first = row % blocks * BLOCK + PART * HALF
        token = first + gl.arange(0, HALF, gl.SliceLayout(1, OUT))
        out_row = out + batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head
        out_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUT))
        result = gl.convert_layout(acc.to(out.dtype.element_ty), OUT)
        pointers = out_row + token.to(gl.int64)[:, None] * out_token + out_dim[None, :]
        gl.store(pointers, result, mask=(token < tokens)[:, None])
        if HAS_LSE:
            row_lse = (running_max + gl.log2(running_sum) - FACTOR) * LN_2 + gl.load(shift + of_query)
            lse_token = first + gl.arange(0, HALF, PER_QUERY)
            gl.store(lse + (row // blocks).to(gl.int64) * tokens + lse_token, row_lse, mask=lse_token < tokens)


@gluon.jit
def _attention_int8_hopper(
    key_tiles, exact_tiles, value_tiles, queries, exact_queries, query_scale, shift, key_scale, value_scale, out, lse,
    work, work_count, kv_count, kv_index, v_batch, v_head, v_column, out_batch, out_token, out_head,
    heads, group, blocks, tokens,
    QUERY_LAYOUT: gl.constexpr, EXACT_LAYOUT: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    FP8: gl.constexpr, HAS_LSE: gl.constexpr, ATTEND_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = key_tiles.block_type.shape[1]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    KEYS: gl.constexpr = key_tiles.block_type.shape[0]
    VALUE_TILE: gl.constexpr = value_tiles.block_type.shape
    keys = gl.allocate_shared_memory(gl.int8, [STAGES, KEYS, HEAD_DIM], key_tiles.layout)
    exact_keys = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, SLOTS], exact_tiles.layout)
    values = gl.allocate_shared_memory(value_tiles.dtype, [STAGES, VALUE_TILE[0], VALUE_TILE[1]], value_tiles.layout)
    query = gl.allocate_shared_memory(gl.int8, [2, HALF, HEAD_DIM], QUERY_LAYOUT)
    exact_query = gl.allocate_shared_memory(gl.float16, [2, HALF, SLOTS], EXACT_LAYOUT)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)  # both warpgroups
        mbarrier.init(values_free.index(stage), count=2)
    fence_async_shared()
    lists = (work, work_count, kv_count, kv_index)
    rings = (keys, exact_keys, values, keys_ready, keys_free, values_ready, values_free)
    gl.warp_specialize(
        [
            (_attend, (
                lists, rings, query.index(0), exact_query.index(0), queries, exact_queries, query_scale, shift,
                key_scale, value_scale, out, lse, out_batch, out_token, out_head, heads, group, blocks, tokens,
                0, STAGES, FP8, HAS_LSE,
            )),
            (_attend, (
                lists, rings, query.index(1), exact_query.index(1), queries, exact_queries, query_scale, shift,
                key_scale, value_scale, out, lse, out_batch, out_token, out_head, heads, group, blocks, tokens,
                1, STAGES, FP8, HAS_LSE,
            )),
            (_load, (
                lists, rings, key_tiles, exact_tiles, value_tiles, heads, group, blocks, v_batch, v_head, v_column,
                STAGES, FP8,
            )),
        ],
        [4, 1], [ATTEND_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def _tiles(tensor: torch.Tensor, shape: list[int], strides: list[int], tile: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, shape, strides, tile, _layout(tile, tensor.dtype))


def _layout(tile: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(tile, _GLUON_DTYPES[dtype])


_GLUON_DTYPES = {
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}


def attend_on_hopper(plan, quantized, matrix, out, lse) -> None:
    head_dim = out.shape[-1]
    fp8 = quantized.values is not None
    value_tile = [head_dim, BLOCK] if fp8 else [BLOCK, head_dim]
    rows = quantized.keys.numel() // head_dim
    with on_device(out):
        _attention_int8_hopper[(min(plan.work.numel(), multiprocessors(out)),)](
            _tiles(quantized.keys, [rows, head_dim], [head_dim, 1], [BLOCK, head_dim]),
            _tiles(quantized.exact_keys, [rows, SLOTS], [SLOTS, 1], [BLOCK, SLOTS]),
            _tiles(matrix.values, matrix.shape, matrix.strides, value_tile),
            quantized.queries, quantized.exact_queries, quantized.query_scale, quantized.shift,
            quantized.key_scale, quantized.value_scale, out, lse,
            plan.work, plan.work_count, plan.kv_count, plan.kv_index, *matrix.place, *out.stride()[:3],
            plan.heads, plan.heads // quantized.keys.shape[1], plan.blocks, plan.tokens,
            QUERY_LAYOUT=_layout([64, head_dim], torch.int8), EXACT_LAYOUT=_layout([64, SLOTS], torch.float16),
            SLOTS=SLOTS, STAGES=STAGES, FP8=fp8, HAS_LSE=lse is not None,
            ATTEND_REGISTERS=ATTEND_REGISTERS, LOAD_REGISTERS=LOAD_REGISTERS, num_warps=4,
        )  # fmt: skip
