"""Descriptors of Hopper's bulk tensor copies (TMA) between boxes of a strided tensor and swizzled shared memory."""

import ctypes
import functools

import torch

from dit_accel.errors import KernelError
from dit_accel.kernels._cuda.runtime import _driver

BYTES = 128
ALIGNMENT = 64  # bytes, of the map
ALIGNED = 16  # bytes, of the tensor's address and strides
DATA_TYPES = {torch.uint8: 0, torch.int8: 0, torch.float16: 6, torch.bfloat16: 9, torch.float8_e4m3fn: 0}
SWIZZLE_128_BYTES = 3
PROMOTE_TO_256_BYTES = 3


class TensorMap(ctypes.Structure):
    """The 128 opaque bytes of a ``CUtensorMap``, a kernel parameter."""

    _fields_ = (("opaque", ctypes.c_uint8 * BYTES),)


def tensor_map(x: torch.Tensor, box: tuple[int, ...]) -> TensorMap:
    """Return a map of ``x`` whose boxes are stored in shared memory with the 128-byte swizzle; outside x reads as 0.

    Args:
        x: any strides in multiples of 16 bytes, the last being 1; at most 5 axes; address a multiple of 16 bytes.
        box: elements of a box along each axis, in x's order; its last axis spans 128 bytes.

    Raises:
        KernelError: the driver refuses the layout.
    """
    size = x.element_size()
    # an axis of length 1 may have any stride, but the driver checks it too
    row = -(-x.shape[-1] * size // ALIGNED) * ALIGNED
    strides = tuple(
        stride * size if length > 1 else row for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    )
    return _encode(x.data_ptr(), DATA_TYPES[x.dtype], tuple(x.shape), strides, box)


def tensor_map_limit(name: str, x: torch.Tensor) -> str | None:
    """Return why the copy engine does not support ``x``, or None."""
    size = x.element_size()
    strides = [stride for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1]
    if x.data_ptr() % ALIGNED or any(stride <= 0 or stride * size % ALIGNED for stride in strides):
        return (
            f"{name} must begin at and have strides in positive multiples of 16 bytes, got strides {list(x.stride())}; "
            "call .contiguous()"
        )
    return None


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int, data_type: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    rank = len(shape)
    buffer = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        data_type,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*reversed(strides)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        SWIZZLE_128_BYTES,
        PROMOTE_TO_256_BYTES,
        0,  # zeros out of bounds
    )
    if error:
        raise KernelError(
            f"the CUDA driver can't map a tensor of shape {shape}, strides {strides} bytes, in boxes {box} ({error}); "
            "use backend='triton'"
        )
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, BYTES))
