"""Helpers of the launchers: device selection, fast launches, properties of the GPU, and bits of packed words."""

import contextlib

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from dit_accel.kernels.backends import device_properties

INTERPRETER_PROGRAMS = 3  # few enough that persistent loops run more than once


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's device current, because Triton launches on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def launch(kernel, programs: int, tensors: tuple, numbers: tuple, **named) -> None:
    """``kernel[(programs,)](*tensors, *numbers, **named)``, with less host time from the second call on.

    Triton checks each argument of a call to find the compiled kernel, which takes longer than a short kernel runs. Here
    calls share a compiled kernel if their tensors have the same dtypes and alignment to 16 bytes, their descriptors
    have tiles of the same shape, and all else is equal. ``tensors`` may be descriptors or None, except for the first
    one, whose device launches. ``named`` are the kernel's constants and Triton's options.
    """
    key = (kernel, tensors[0].device, *map(_kind, tensors), *numbers, *named, *named.values())
    compiled, constants = _COMPILED.get(key, (None, ()))
    with on_device(tensors[0]):
        if compiled is not None:
            compiled[(programs, 1, 1)](*tensors, *numbers, *constants)
            return
        compiled = kernel[(programs,)](*tensors, *numbers, **named)
    if compiled is not None:  # the interpreter compiles nothing
        _COMPILED[key] = compiled, [named[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]]


_COMPILED: dict[tuple, tuple[CompiledKernel, list]] = {}


def _kind(tensor: torch.Tensor | TensorDescriptor | None) -> object:
    if tensor is None:
        return None
    if isinstance(tensor, TensorDescriptor):
        return tensor.base.dtype, tuple(tensor.block_shape)
    return tensor.dtype, tensor.data_ptr() % 16


def unit_stride(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``x`` with contiguous features."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def broadcast_strides(x: torch.Tensor | None, axes: int) -> tuple[int, ...]:
    """Strides of the first axes, 0 along those that broadcast."""
    if x is None:
        return (0,) * axes
    return tuple(x.stride(axis) if x.shape[axis] > 1 else 0 for axis in range(axes))


def next_power_of_2(number: int) -> int:
    """Smallest power of 2 that is at least a positive number; Triton's own function takes 20 us from Python."""
    return 1 << (number - 1).bit_length()


def multiprocessors(tensor: torch.Tensor) -> int:
    return device_properties(tensor.device).multi_processor_count if tensor.is_cuda else INTERPRETER_PROGRAMS


def precision(x: torch.Tensor) -> str:
    """Precision of products: exact for float32, which is for tests; other types use the matrix units directly."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def load_floats(pointers, inside):
    """Load values as float32, 0 outside."""
    return tl.load(pointers, inside, other=0.0).to(tl.float32)


@triton.jit
def key_end_of(kv_len, batch, tokens, HAS_KV_LEN: tl.constexpr):
    """Number of valid keys of a sample."""
    key_end = tokens
    if HAS_KV_LEN:
        key_end = tl.minimum(tl.maximum(tl.load(kv_len + batch), 0), tokens)
    return key_end


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
