"""Sparse symbols, the packed bits that say what a DISPATCH step computes, and the plan that kernels eat.

Bits are 1 for *compute* and packed least significant bit first, so bit ``i`` of a row is
``(bytes[i // 8] >> (i % 8)) & 1`` (FlashOmni, section 3.4, decode formula with n = 1). FlashOmni's worked example
prints the same masks most significant bit first.

Symbols are canonical and small; :func:`dit_accel.kernels.lowering.lower` turns them into an :class:`AttentionPlan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dit_accel.errors import ShapeError
from dit_accel.layout import block_count

MAX_HEADS = 64  # a row-block's heads fit one 64-bit word


@dataclass(frozen=True)
class SparseSymbols:
    """What one site of one branch computes in a DISPATCH step.

    Args:
        cache_bits: S_c, uint8 ``[B, Tq, ceil(H / 8)]``, packed along heads; 0 = the row is REUSED (filled from the
        cache). skip_bits: S_s, uint8 ``[B, H, Tq, ceil(Tk / 8)]``, packed along key blocks, each row byte-aligned; 0 =
        the tile
            is skipped. None = every tile computes.
        heads: H, at most 64.
        tokens: length of the joint sequence; queries and keys are the same tokens.
        block: tokens in a block.
    """

    cache_bits: torch.Tensor
    skip_bits: torch.Tensor | None
    heads: int
    tokens: int
    block: int

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= MAX_HEADS:
            raise ShapeError(f"heads must be between 1 and {MAX_HEADS}, got {self.heads}")
        blocks = self.blocks
        batch = self.cache_bits.shape[0] if self.cache_bits.dim() else 1
        _require_bits("cache_bits", self.cache_bits, (batch, blocks, block_count(self.heads, 8)))
        if self.skip_bits is not None:
            _require_bits("skip_bits", self.skip_bits, (batch, self.heads, blocks, block_count(blocks, 8)))

    @property
    def blocks(self) -> int:
        return block_count(self.tokens, self.block)

    def tensors(self) -> list[torch.Tensor]:
        return [self.cache_bits] + ([] if self.skip_bits is None else [self.skip_bits])


@dataclass(frozen=True)
class AttentionPlan:
    """Lowered symbols: index lists on the device, made without a host synchronisation.

    Counts live on the device, so every list has its full capacity and only its first ``count`` entries mean anything.

    Args:
        mask64: int64 ``[B, Tq]``; bit h set = head h of the row-block computes.
        kv_count: int32 ``[B, H, Tq]``; tiles that compute in the row (0 for a reused row).
        kv_index: int32 ``[B, H, Tq, Tk]``; key blocks of those tiles, ascending.
        row_count: int32 ``[B, H]``; row-blocks that compute.
        row_index: int32 ``[B, H, Tq]``; those row-blocks, ascending.
        work_count: int32 ``[1]``; rows that compute over all batches and heads.
        work: int32 ``[B * H * Tq]``; those rows as ``(b * H + h) * Tq + i``, head by head, longest first within a head.
        tokens: length of the sequence.
        block: tokens in a block.
    """

    mask64: torch.Tensor
    kv_count: torch.Tensor
    kv_index: torch.Tensor
    row_count: torch.Tensor
    row_index: torch.Tensor
    work_count: torch.Tensor
    work: torch.Tensor
    tokens: int
    block: int

    @property
    def batch(self) -> int:
        return self.kv_count.shape[0]

    @property
    def heads(self) -> int:
        return self.kv_count.shape[1]

    @property
    def blocks(self) -> int:
        return self.kv_count.shape[2]

    def tensors(self) -> list[torch.Tensor]:
        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]


def _require_bits(name: str, bits: torch.Tensor, shape: tuple[int, ...]) -> None:
    if bits.dtype != torch.uint8 or tuple(bits.shape) != shape:
        raise ShapeError(f"{name} must be uint8 {list(shape)}, got {bits.dtype} {list(bits.shape)}")
