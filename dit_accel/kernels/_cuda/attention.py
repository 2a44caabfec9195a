"""Launchers of the Hopper attention kernels: ``attention.cu`` for tiles, ``slices.cu`` for single keys.

Both load and store boxes of strided tensors by bulk copies (TMA), which descriptors of the tensors describe.
"""

import ctypes
import functools

import torch

from dit_accel.errors import KernelError
from dit_accel.kernels._cuda.runtime import driver, kernel, resting_counters, why_not
from dit_accel.kernels.backends import device_properties
from dit_accel.kernels.constants import LOG2_E
from dit_accel.kernels.symbols import masks_of

BLOCK, THREADS = 128, 384  # as in the CUDA sources
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
TILES = 7  # tiles in shared memory: 2 of queries, 3 of keys and 2 of values
SHARED_BEYOND_TILES = 3072
MAX_PROGRAMS = 192
SHARED_ROWS = 4 * MAX_PROGRAMS  # most rows that are cut into shares; each row has a counter for each consumer
CONSUMER_THREADS = 256
MAP_BYTES = 128
ALIGNMENT = 64  # bytes, of the map
ALIGNED = 16  # bytes, of the tensor's address and strides
MAP_DTYPES = {torch.float16: 6, torch.bfloat16: 9}
SWIZZLE_128_BYTES = 3
PROMOTE_TO_256_BYTES = 3


def limit(q, k, v, plan, kv_len, pv_threshold, qk_dtype, out) -> str | None:
    """Return why the kernel can't take these arguments, or None."""
    if plan.masks is not None and kv_len is not None:
        return "kv_len must be None if the plan has masks"
    if pv_threshold is not None or qk_dtype is not None:
        return f"pv_threshold and qk_dtype must be None, got {pv_threshold} and {qk_dtype}"
    return _tensor_limit(q, k, v, plan, out)


def slices_limit(q, k, v, plan, out) -> str | None:
    """Return why the kernel for single keys can't take these arguments on the tensors' CUDA device, or None."""
    return why_not(q.device) or _tensor_limit(q, k, v, plan, out)


def _tensor_limit(q, k, v, plan, out) -> str | None:
    if q.numel() == 0:
        return f"q must not be empty, got {list(q.shape)}"
    if q.dtype not in DTYPES:
        return f"q must be float16 or bfloat16, got {q.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, got {q.shape[-1]}"
    if plan.block != BLOCK:
        return f"the plan's block must be {BLOCK}, got {plan.block}"
    named = {"q": q, "k": k, "v": v, "out": out}
    return next((reason for name, x in named.items() if x is not None and (reason := tensor_map_limit(name, x))), None)


def tensor_map_limit(name: str, x: torch.Tensor) -> str | None:
    """Return why the copy engine does not support ``x``, or None."""
    size = x.element_size()
    strides = [stride for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1]
    if x.data_ptr() % ALIGNED or any(stride <= 0 or stride * size % ALIGNED for stride in strides):
        rule = f"{name} must begin at and have strides in positive multiples of 16 bytes"
        return f"{rule}, got strides {list(x.stride())}; call .contiguous()"
    return None


def attention_into(q, k, v, plan, scale, kv_len, out, lse) -> None:
    programs = min(device_properties(q.device).multi_processor_count, MAX_PROGRAMS)
    part = CONSUMER_THREADS * (q.shape[-1] // 2 + 4)
    parts = torch.empty(programs * 2 * part, dtype=torch.float32, device=q.device)
    counters = resting_counters("attention", 2 + 2 * SHARED_ROWS, q.device)
    maps = [tensor_map(x, (1, BLOCK, 1, 64)) for x in (q, k, v)] + [tensor_map(out, (1, BLOCK // 2, 1, 64))]
    arguments = *maps, plan.work, plan.work_count, plan.kv_count, plan.kv_index, kv_len, counters, parts, lse
    codes, pool, codes_strides = masks_of(plan)
    masks = () if codes is None else (plan.full_count, codes, pool, *codes_strides)
    _launch("attention", q, k, plan, scale, kv_len, (*arguments, *masks), has_masks=codes is not None)


def add_slices_into(q, k, v, plan, scale, kv_len, out, lse) -> None:
    slices = plan.slices
    strided = [(x, *map(ctypes.c_longlong, x.stride()[:3])) for x in (k, v, out)]  # batch, token, head
    arguments = (
        tensor_map(q, (1, BLOCK, 1, 64)), tensor_map(out, (1, BLOCK // 2, 1, 64)),
        *strided[0], *strided[1], *strided[2], lse, slices.bits.contiguous(), slices.count,
        slices.work, slices.work_count, plan.kv_count, kv_len, resting_counters("slices", 2, q.device),
    )  # fmt: skip
    _launch("slices", q, k, plan, scale, kv_len, arguments)


def _launch(name, q, k, plan, scale, kv_len, arguments, has_masks=False) -> None:
    """Launch a kernel with ``arguments``, followed by the sizes that both kernels take last."""
    tokens, heads, head_dim = q.shape[1:]
    defines = (
        *(("HEAD_DIM", head_dim), ("ELEMENT_BF16", int(q.dtype == torch.bfloat16))),
        *(("HAS_KV_LEN", int(kv_len is not None)), ("HAS_MASKS", int(has_masks))),
    )
    kernel(name, q.device, defines, TILES * BLOCK * head_dim * 2 + SHARED_BEYOND_TILES).launch(
        min(device_properties(q.device).multi_processor_count, MAX_PROGRAMS),
        THREADS,
        (*arguments, heads, heads // k.shape[2], plan.blocks, tokens, scale * LOG2_E),
    )


class TensorMap(ctypes.Structure):
    """The 128 opaque bytes of a ``CUtensorMap``, a kernel parameter."""

    _fields_ = (("opaque", ctypes.c_uint8 * MAP_BYTES),)


def tensor_map(x: torch.Tensor, box: tuple[int, ...]) -> TensorMap:
    """Return a map of ``x``, which :func:`tensor_map_limit` supports, whose boxes are stored with the 128-byte swizzle.

    ``box``: elements along each axis, in x's order; the last axis spans 128 bytes. Outside of x a box reads 0.
    """
    size = x.element_size()
    # an axis of length 1 may have any stride, but the driver checks it too
    row = -(-x.shape[-1] * size // ALIGNED) * ALIGNED
    axes = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    strides = tuple(stride * size if length > 1 else row for stride, length in axes)
    return _encode(x.data_ptr(), MAP_DTYPES[x.dtype], tuple(x.shape), strides, box)


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int, data_type: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    rank, buffer = len(shape), ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    error = driver().cuTensorMapEncodeTiled(
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
        what = f"a tensor of shape {shape}, strides {strides} bytes, in boxes {box}"
        raise KernelError(f"the CUDA driver can't map {what} ({error}); use backend='triton'")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, MAP_BYTES))
