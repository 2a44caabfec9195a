"""Packing of boolean masks into bytes, least significant bit first.

Bit ``i`` of a row is ``(bytes[i // 8] >> (i % 8)) & 1``: FlashOmni, section 3.4, decode formula with n = 1. The example
in its section 3.3 (bytes 224, 235, 197) prints the same masks with the most significant bit first.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import custom_op, eager_op
from dit_accel.kernels.layout import block_count


@custom_op(lambda mask, **_: mask.new_empty(*mask.shape[:-1], block_count(mask.shape[-1], 8), dtype=torch.uint8))
def pack_bits(mask: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Pack a mask along its last axis into bytes; bits beyond its end are 0.

    >>> pack_bits(torch.tensor([True, True, False, False, False, False, False, False, True])).tolist()
    [3, 1]

    Args:
        mask: bool ``[..., n]``, n >= 1.

    Returns:
        uint8 ``[..., ceil(n / 8)]``.
    """
    checks.require_dtype("mask", mask, (torch.bool,))
    if mask.dim() == 0 or mask.shape[-1] == 0:
        raise ShapeError(f"mask must have shape [..., n] with n >= 1, got {list(mask.shape)}")
    if resolve_backend(backend, mask) == "triton":
        from dit_accel.kernels._triton.packing import pack_bits as pack_bits_triton

        return pack_bits_triton(mask)
    padded = F.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (padded << _bit_positions(mask.device)).sum(-1, dtype=torch.uint8)


@eager_op
def unpack_bits(bits: torch.Tensor, n: int, *, backend: str = "auto") -> torch.Tensor:
    """Unpack the first ``n`` bits of each row of bytes; undoes :func:`pack_bits`.

    Args:
        bits: uint8 ``[..., ceil(n / 8)]``.
        n: bits in a row, at least 1.

    Returns:
        bool ``[..., n]``.
    """
    checks.require_dtype("bits", bits, (torch.uint8,))
    if n < 1 or bits.dim() == 0 or bits.shape[-1] != block_count(n, 8):
        raise ShapeError(f"bits must have shape [..., ceil(n / 8)] with n >= 1, got {list(bits.shape)} with n={n}")
    if resolve_backend(backend, bits) == "triton":
        from dit_accel.kernels._triton.packing import unpack_bits as unpack_bits_triton

        return unpack_bits_triton(bits, n)
    return (bits[..., None] >> _bit_positions(bits.device) & 1).flatten(-2)[..., :n].bool()


def _bit_positions(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
