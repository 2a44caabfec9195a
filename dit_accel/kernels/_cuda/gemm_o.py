"""Launcher of the Hopper output projection, ``gemm_o.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from dit_accel.kernels._cuda.common import (
    SHARED_BYTES,
    THREADS,
    element_defines,
    hopper_kernel_limit,
    tensor_maps_limit,
)
from dit_accel.kernels._cuda.runtime import kernel, multiprocessors, resting_counters
from dit_accel.kernels._cuda.tensor_map import TensorMap, tensor_map
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import AttentionPlan

COLUMN_TILE = 256
MAX_SOURCES = 4  # o and the entries of its history
MAX_ENTRIES = 8  # entries of a stack


def limit(
    o: torch.Tensor,
    weight: torch.Tensor,
    plan: AttentionPlan,
    offset: int,
    *,
    bias: torch.Tensor | None = None,
    history: Sequence[torch.Tensor] = (),
    entries: int = 1,
    tensors: Sequence[tuple[str, torch.Tensor | None]] = (),
) -> str | None:
    """Return why the kernel can't take these arguments, or None."""
    if problem := hopper_kernel_limit(o, "o", o.shape[-1], plan, offset):
        return problem
    if weight.shape[0] % 8:
        return f"weight must have a multiple of 8 rows, got {weight.shape[0]}"
    if bias is not None and bias.data_ptr() % 4:
        return "bias must begin at a multiple of 4 bytes"
    if len(history) >= MAX_SOURCES:
        return f"history must have at most {MAX_SOURCES - 1} entries, got {len(history)}"
    if entries > MAX_ENTRIES:
        return f"stack must have at most {MAX_ENTRIES} entries, got {entries}"
    named = [("o", o), ("weight", weight), *((f"history[{i}]", entry) for i, entry in enumerate(history)), *tensors]
    return tensor_maps_limit(named)


def update(o, weight, bias, plan, history, previous, offset) -> tuple[torch.Tensor, torch.Tensor]:
    out = o.new_empty(*o.shape[:2], weight.shape[0])
    stack = o.new_empty(1 + len(history), *out.shape)
    _launch((o, *history), weight, bias, plan, stack, (), offset, out, previous)
    return out, stack


def dispatch_into(o, weight, plan, stack, weights, offset, out) -> None:
    _launch((o,), weight, None, plan, stack, weights, offset, out)


def _launch(sources, weight, bias, plan, stack, weights, offset, out, previous=None) -> None:
    """Launch a DISPATCH if there are weights, else an UPDATE of every source."""
    o = sources[0]
    stack_before, mask64_before = previous or (stack, None)
    batch, length, heads, head_dim = o.shape
    columns = weight.shape[0]
    first_block = offset // plan.block
    row_blocks = block_count(offset + length, plan.block) - first_block
    column_tiles = block_count(columns, COLUMN_TILE)
    shape = (
        heads, plan.blocks, first_block, row_blocks, batch * row_blocks, offset, length, columns, column_tiles,
        len(stack),
    )  # fmt: skip
    maps = [tensor_map(source, (1, plan.block, 1, 64)) for source in sources]
    defines = (*element_defines(o, head_dim), ("DISPATCH", int(len(weights) > 0)))
    kernel("gemm_o.cu", "gemm_o", o.device, defines).launch(
        multiprocessors(o.device),
        THREADS,
        (
            (TensorMap * MAX_SOURCES)(*maps, *[maps[0]] * (MAX_SOURCES - len(maps))),
            tensor_map(weight, (plan.block, 64)),
            tensor_map(stack_before, (1, 1, plan.block, 64)),
            tensor_map(stack, (1, 1, 64, 64)),
            tensor_map(out[None], (1, 1, 64, 64)),
            bias,
            plan.mask64,
            mask64_before,
            resting_counters("gemm_o", 2, o.device),
            (ctypes.c_float * MAX_ENTRIES)(*weights),
            (ctypes.c_int * len(shape))(*shape),
        ),
        shared_bytes=SHARED_BYTES,
    )
