"""Packing of boolean masks into bytes, least significant bit first.

Bit ``i`` of a row is ``(bytes[i // 8] >> (i % 8)) & 1``: FlashOmni, section 3.4, decode formula with n = 1. The example
in its section 3.3 (bytes 224, 235, 197) prints the same masks with the most significant bit first.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.layout import block_count


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack a mask bool ``[..., n]`` along its last axis into uint8 ``[..., ceil(n / 8)]``; bits beyond its end are 0.

    >>> pack_bits(torch.tensor([True, True, False, False, False, False, False, False, True])).tolist()
    [3, 1]
    """
    checks.require_dtype("mask", mask, (torch.bool,))
    if mask.dim() == 0 or mask.shape[-1] == 0:
        raise ShapeError(f"mask must have shape [..., n] with n >= 1, got {list(mask.shape)}")
    padded = F.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (padded << _bit_positions(mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: torch.Tensor, n: int) -> torch.Tensor:
    """Unpack the first ``n`` bits of uint8 ``[..., ceil(n / 8)]`` into bool ``[..., n]``; undoes :func:`pack_bits`."""
    checks.require_dtype("bits", bits, (torch.uint8,))
    if n < 1 or bits.dim() == 0 or bits.shape[-1] != block_count(n, 8):
        raise ShapeError(f"bits must have shape [..., ceil(n / 8)] with n >= 1, got {list(bits.shape)} with n={n}")
    return (bits[..., None] >> _bit_positions(bits.device) & 1).flatten(-2)[..., :n].bool()


def _bit_positions(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
