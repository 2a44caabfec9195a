"""Sparse symbols, the packed bits that define what a DISPATCH step computes, and the plan that kernels read.

Bits are 1 for *compute*, and packed as :mod:`dit_accel.kernels.packing` says.

Symbols are canonical and small; :func:`dit_accel.kernels.lower` turns them into an :class:`AttentionPlan`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.layout import block_count

MAX_HEADS = 64  # so that a row-block's heads fit one 64-bit word
SHORT_PAIRS = 2**25  # pairs of tokens over all heads; 8 heads of 2048 tokens take about 20 us on an H200

FULL_TILE = 0  # codes of TileMasks
CAUSAL_TILE = 1
FIRST_PARTIAL_TILE = 2


class _Tensors:
    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, with those of masks and slices last."""
        values = list(vars(self).values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return tensors + [tensor for part in values if isinstance(part, _Tensors) for tensor in part.tensors()]


@dataclass(frozen=True)
class TileMasks(_Tensors):
    """Masks inside tiles: the (query, key) pairs of a computed tile that attend.

    Codes of skipped tiles are ignored. Codes are not checked, because the host would have to wait: a code below 0 or
    beyond the pool's last entry reads memory outside of the pool.
    """

    codes: torch.Tensor  # int32 [B or 1, H or 1, Tq, Tk]; 0 = FULL, 1 = CAUSAL (keys up to the query), 2 + p = PARTIAL
    pool: torch.Tensor  # uint8 [P, block, block / 8], P may be 0; row i of entry p packs the keys of the tile's query i

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.int32 or self.codes.dim() != 4:
            got = f"{self.codes.dtype} {list(self.codes.shape)}"
            raise ShapeError(f"codes must be int32 [B or 1, H or 1, Tq, Tk], got {got}")
        if self.pool.dtype != torch.uint8 or self.pool.dim() != 3 or self.pool.shape[2] * 8 != self.block:
            got = f"got {self.pool.dtype} {list(self.pool.shape)}; pack masks bool [P, block, block] with pack_bits"
            raise ShapeError(f"pool must be uint8 [P, block, block / 8], {got}")
        if self.pool.device != self.codes.device:
            raise ShapeError(f"pool must be on codes's device {self.codes.device}, got {self.pool.device}")

    @property
    def block(self) -> int:
        return self.pool.shape[1]


@dataclass(frozen=True)
class SparseSymbols(_Tensors):
    """Tiles and rows that one site of one branch computes in a DISPATCH step.

    Bits of ``skip_bits``, ``linear_bits`` and ``slice_bits`` are packed along keys, each row byte-aligned. No tile may
    be in both of the first two. ``slice_bits`` are keys that a row attends to in tiles that ``skip_bits`` skips. In
    computed tiles a bit, which nothing checks, would count its key twice. Bits beyond the last token are ignored.
    """

    cache_bits: torch.Tensor  # S_c, uint8 [B, Tq, ceil(H / 8)], packed along heads; 0 = the row is REUSED
    skip_bits: torch.Tensor | None  # S_s, uint8 [B, H, Tq, ceil(Tk / 8)]; 0 = skip the tile; None = all tiles compute
    heads: int  # at most 64
    tokens: int  # of the joint sequence; queries and keys are the same tokens
    block: int  # tokens in a block
    masks: TileMasks | None = None  # inside the tiles that compute; None = all are FULL
    linear_bits: torch.Tensor | None = None  # SLA's marginal tiles, for linear attention, shaped like skip_bits
    slice_bits: torch.Tensor | None = None  # FG-Attn's single keys, uint8 [B, H, Tq, Tk * block / 8]

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= MAX_HEADS:
            raise ShapeError(f"heads must be between 1 and {MAX_HEADS}, got {self.heads}")
        blocks = self.blocks
        batch = self.cache_bits.shape[0] if self.cache_bits.dim() else 1
        device = self.cache_bits.device
        _require_list("cache_bits", self.cache_bits, (batch, blocks, block_count(self.heads, 8)), device)
        for name in ("skip_bits", "linear_bits"):
            if (bits := getattr(self, name)) is not None:
                _require_list(name, bits, (batch, self.heads, blocks, block_count(blocks, 8)), device)
        if self.slice_bits is not None:
            _require_list("slice_bits", self.slice_bits, (batch, self.heads, blocks, blocks * self.block // 8), device)
            if self.skip_bits is None:
                raise ShapeError("slice_bits must be None if skip_bits is None, because then every tile computes")
        if self.masks is not None:
            _require_masks(self.masks, batch, self.heads, blocks, self.block, device)

    @property
    def blocks(self) -> int:
        return block_count(self.tokens, self.block)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the symbols with ``change`` applied to each tensor."""
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        masks = self.masks and TileMasks(change(self.masks.codes), change(self.masks.pool))
        return replace(self, **tensors, masks=masks)

    def to(self, device: torch.device | str) -> Self:
        """Return the symbols on a device."""
        return self.mapped(lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class Slices(_Tensors):
    """Single keys that rows attend to besides their tiles (FG-Attn, section 4.1), listed in bits only."""

    bits: torch.Tensor  # uint8 [B, H, Tq, Tk * block / 8], the symbols' slice_bits; bits of reused rows are ignored
    count: torch.Tensor  # int32 [B, H, Tq]; single keys of the row, 0 if it is reused
    work_count: torch.Tensor  # int32 [1]; rows with single keys
    work: torch.Tensor  # int32 [B * H * Tq]; these rows as (b * H + h) * Tq + i, head by head, most keys first


@dataclass(frozen=True)
class AttentionPlan(_Tensors):
    """Lowered symbols: index lists on the device, made without a host synchronisation.

    Counts are on the device, so every list has its full capacity, and only its first ``count`` entries are valid.
    """

    mask64: torch.Tensor  # int64 [B, Tq]; bit h set = head h of the row-block computes
    kv_count: torch.Tensor  # int32 [B, H, Tq]; tiles that compute in the row, 0 if it is reused
    kv_index: torch.Tensor  # int32 [B, H, Tq, Tk]; key blocks of these tiles, ascending, FULL ones before masked ones
    work_count: torch.Tensor  # int32 [1]; rows that compute, over all samples and heads
    work: torch.Tensor  # int32 [B * H * Tq]; these rows as (b * H + h) * Tq + i, longest first; order as for `lower`
    tokens: int  # of the sequence
    block: int  # tokens in a block
    full_count: torch.Tensor | None = None  # int32 [B, H, Tq]; FULL tiles of the row; None without masks
    masks: TileMasks | None = None  # the symbols' masks; None = all tiles are FULL
    linear_bits: torch.Tensor | None = None  # the symbols' marginal tiles, in no list; bits of reused rows are ignored
    slices: Slices | None = None  # single keys besides the tiles

    def __post_init__(self) -> None:
        if (self.full_count is None) != (self.masks is None):
            raise ShapeError("full_count and masks must both be given, or both be None")
        rows, device = (self.batch, self.heads, self.blocks), self.kv_count.device
        if self.linear_bits is not None:
            _require_list("linear_bits", self.linear_bits, (*rows, block_count(self.blocks, 8)), device)
        if self.masks is not None:
            _require_list("full_count", self.full_count, rows, device, torch.int32)
            _require_masks(self.masks, *rows, self.block, device)

    @property
    def batch(self) -> int:
        return self.kv_count.shape[0]

    @property
    def heads(self) -> int:
        return self.kv_count.shape[1]

    @property
    def blocks(self) -> int:
        return self.kv_count.shape[2]

    @property
    def is_short(self) -> bool:
        """Return True if attention under the plan takes no longer than its launch from Python."""
        return self.work.numel() * self.blocks * self.block**2 <= SHORT_PAIRS


def masks_of(plan: AttentionPlan) -> tuple[torch.Tensor | None, torch.Tensor | None, tuple[int, ...]]:
    """Return codes and pool of a plan's masks, and the codes' strides of batch and head (0 along broadcast axes)."""
    if plan.masks is None:
        return None, None, (0, 0)
    codes = plan.masks.codes.contiguous()
    strides = tuple(codes.stride(axis) if codes.shape[axis] > 1 else 0 for axis in (0, 1))
    return codes, plan.masks.pool.contiguous(), strides


def _require_list(
    name: str, values: torch.Tensor, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.uint8
) -> None:
    if values.device != device:
        raise ShapeError(f"{name} must be on the device {device} of the other lists, got {values.device}")
    if values.dtype != dtype or tuple(values.shape) != shape:
        required = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise ShapeError(f"{name} must be {required}, got {values.dtype} {list(values.shape)}")


def _require_masks(masks: TileMasks, batch: int, heads: int, blocks: int, block: int, device: torch.device) -> None:
    shape = tuple(masks.codes.shape)
    if shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != (blocks, blocks):
        expected = f"[{batch} or 1, {heads} or 1, {blocks}, {blocks}]"
        raise ShapeError(f"masks.codes must have shape {expected}, got {list(shape)}")
    if masks.block != block:
        raise ShapeError(f"masks.pool must hold tiles of {block} tokens, got {masks.block}")
    if masks.codes.device != device:
        raise ShapeError(f"masks must be on the symbols' device {device}, got {masks.codes.device}")
