"""Launcher of ``packing.cu``."""

from __future__ import annotations

import ctypes

import torch

from dit_accel.kernels._cuda.runtime import kernel
from dit_accel.kernels.layout import block_count

SPAN = 256  # entries of a row that a warp packs
WARPS = 8


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    n = mask.shape[-1]
    bits = torch.empty((*mask.shape[:-1], block_count(n, 8)), dtype=torch.uint8, device=mask.device)
    if bits.numel():
        rows, spans = mask.numel() // n, block_count(n, SPAN)
        kernel("packing.cu", "pack_bits", mask.device).launch(
            (block_count(rows * spans, WARPS),),
            32 * WARPS,
            (mask.contiguous(), bits, ctypes.c_longlong(rows), n, spans),
        )
    return bits
