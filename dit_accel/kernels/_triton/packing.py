"""Packing and unpacking of bits: one program packs or unpacks ``BYTES`` bytes of the flattened rows."""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch
from dit_accel.kernels.layout import block_count

BYTES = 256


@triton.jit
def _pack(mask, bits, n, row_bytes, total_bytes, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    position = (byte % row_bytes)[:, None] * 8 + tl.arange(0, 8)[None, :]  # [bytes, 8], bit within its row
    valid = (byte < total_bytes)[:, None] & (position < n)
    value = tl.load(mask + (byte // row_bytes)[:, None] * n + position, valid, other=0).to(tl.int32)
    packed = tl.sum(value << tl.arange(0, 8)[None, :], 1)
    tl.store(bits + byte, packed.to(tl.uint8), byte < total_bytes)


@triton.jit
def _unpack(bits, mask, n, row_bytes, total_bytes, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    position = (byte % row_bytes)[:, None] * 8 + tl.arange(0, 8)[None, :]
    valid = (byte < total_bytes)[:, None] & (position < n)
    packed = tl.load(bits + byte, byte < total_bytes, other=0).to(tl.int32)
    value = packed[:, None] >> tl.arange(0, 8)[None, :] & 1
    tl.store(mask + (byte // row_bytes)[:, None] * n + position, value.to(tl.uint8), valid)


@triton.jit
def store_bits(bits, mask, row, rows, row_bytes, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Packs bool [ROWS, TILES] into the rows' bytes."""
    position = tl.arange(0, 8)[None, None, :]
    packed = tl.sum(tl.reshape(mask.to(tl.int32), [ROWS, TILES // 8, 8]) << position, 2)
    byte = tl.arange(0, TILES // 8)[None, :]
    tl.store(bits + row * row_bytes + byte, packed.to(tl.uint8), (row < rows) & (byte < row_bytes))


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    n = mask.shape[-1]
    bits = torch.empty((*mask.shape[:-1], block_count(n, 8)), dtype=torch.uint8, device=mask.device)
    if bits.numel():
        tensors, programs = (mask.contiguous().view(torch.uint8), bits), triton.cdiv(bits.numel(), BYTES)
        launch(_pack, programs, tensors, (n, bits.shape[-1], bits.numel()), BYTES=BYTES)
    return bits


def unpack_bits(bits: torch.Tensor, n: int) -> torch.Tensor:
    mask = torch.empty((*bits.shape[:-1], n), dtype=torch.bool, device=bits.device)
    if bits.numel():
        tensors, programs = (bits.contiguous(), mask.view(torch.uint8)), triton.cdiv(bits.numel(), BYTES)
        launch(_unpack, programs, tensors, (n, bits.shape[-1], bits.numel()), BYTES=BYTES)
    return mask
