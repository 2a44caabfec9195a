"""What every launcher needs: the right device, the size of a persistent grid, and the head walk of a packed word."""

from __future__ import annotations

import contextlib
import functools

import torch
import triton
import triton.language as tl

INTERPRETER_PROGRAMS = 3  # enough that a persistent loop goes round


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def multiprocessors(tensor: torch.Tensor) -> int:
    return _device_properties(tensor.device).multi_processor_count if tensor.is_cuda else INTERPRETER_PROGRAMS


def is_hopper_or_later(tensor: torch.Tensor) -> bool:
    """True where a program has 227 KiB of shared memory (sm90, sm100); sm86, sm89 and sm120 have 99."""
    return tensor.is_cuda and _device_properties(tensor.device).major in (9, 10)


@functools.cache
def _device_properties(device: torch.device):
    return torch.cuda.get_device_properties(device)


@triton.jit
def lowest_head(word):
    """Position of the lowest set bit of a non-zero int64 word: the exponent of an exact power of two in float32."""
    return ((word & -word).to(tl.float32).to(tl.int32, bitcast=True) >> 23 & 0xFF) - 127


@triton.jit
def count_heads(word):
    """Set bits of an int64 word."""
    return tl.sum((word >> tl.arange(0, 64)) & 1, 0).to(tl.int32)
