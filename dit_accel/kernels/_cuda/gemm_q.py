"""Launcher of the Hopper query projection, ``gemm_q.cu``."""

from __future__ import annotations

import ctypes

from dit_accel.kernels._cuda.common import (
    SHARED_BYTES,
    THREADS,
    element_defines,
    hopper_kernel_limit,
    tensor_maps_limit,
)
from dit_accel.kernels._cuda.runtime import kernel, multiprocessors
from dit_accel.kernels._cuda.tensor_map import tensor_map
from dit_accel.kernels.layout import block_count

MAX_UNITS = 368  # units of one thread block that fit the kernel's table in shared memory
MAX_ROWS = 24_576  # words of the plan that fit the shared memory of the ring of stages, where they lie at first


def limit(x, weight, bias, plan, offset, norm_weight, rope, stream) -> str | None:
    """Return why the kernel can't take these arguments, or None."""
    if problem := hopper_kernel_limit(x, "x", stream.shape[-1], plan, offset):
        return problem
    rows = plan.batch * plan.blocks
    if rows > MAX_ROWS:
        return f"the plan must have at most {MAX_ROWS} row-blocks, got {rows}"
    if x.is_cuda and (units := _units(rows, plan.heads, multiprocessors(x.device))) > MAX_UNITS:
        return f"the plan must have at most {MAX_UNITS} pairs of tiles per multiprocessor, got {units}"
    for name, vector in (("bias", bias), ("norm_weight", norm_weight)):
        if vector is not None and vector.data_ptr() % 4:
            return f"{name} must begin at a multiple of 4 bytes"
    for name, table in zip(("rope cos", "rope sin"), rope or (), strict=False):
        if table.data_ptr() % 8 or table.stride(0) % 2:
            return f"{name} must begin at and have strides in multiples of 8 bytes"
    return tensor_maps_limit((("x", x), ("weight", weight), ("out", stream)))


def gemm_q_into(x, weight, bias, plan, offset, norm_weight, norm_eps, rope, stream) -> None:
    """Write x's queries into ``stream`` ``[B, S, H, D]``, the output's tokens for x."""
    batch, length, channels = x.shape
    head_dim = stream.shape[-1]
    first_block = offset // plan.block
    row_blocks = block_count(offset + length, plan.block) - first_block
    cos, sin = rope or (None, None)
    fused = [None if tensor is None else tensor.data_ptr() for tensor in (bias, norm_weight, cos, sin)]
    shape = (
        plan.heads, plan.blocks, first_block, row_blocks, batch * row_blocks, offset, length, channels,
        0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0),
    )  # fmt: skip
    maps = tensor_map(x, (1, plan.block, 64)), tensor_map(weight, (head_dim, 64)), tensor_map(stream, (1, 64, 1, 64))
    kernel("gemm_q.cu", "gemm_q", x.device, element_defines(x, head_dim)).launch(
        multiprocessors(x.device),
        THREADS,
        (*maps, plan.mask64, (ctypes.c_void_p * 4)(*fused), (ctypes.c_int * len(shape))(*shape), float(norm_eps)),
        shared_bytes=SHARED_BYTES,
    )


def _units(rows: int, heads: int, programs: int) -> int:
    """Largest number of units of one thread block: each head of each group of rows may have one unpaired tile."""
    groups = max((rows * heads + programs) // (2 * programs), 1)
    return block_count((rows + groups) * heads, 2 * programs)
