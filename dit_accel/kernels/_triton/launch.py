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
def set_bits(word):
    """Number of set bits in each int64 word: neighbours are added, in fields of 2, 4, then 8 bits."""
    word -= word >> 1 & 0x5555555555555555
    word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word += word >> 8  # bytes hold at most 16, 32, then 64: no carry
    word += word >> 16
    word += word >> 32
    return (word & 0x7F).to(tl.int32)
