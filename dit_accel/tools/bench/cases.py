"""What is checked and timed: sizes, shares that compute, and the random tensors and symbols drawn for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols, TileMasks
from dit_accel.kernels.tile_masks import symbols_from_mask

Attends = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (query, key) positions, broadcast -> bool


@dataclass(frozen=True)
class Case:
    """One size and sparsity; ``rows`` and ``tiles`` are the shares that compute."""

    tokens: int
    heads: int = 24
    head_dim: int = 128
    block: int = 128
    batch: int = 1
    rows: float = 1.0
    tiles: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    valid_keys: int | None = None

    @property
    def shape(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"B{self.batch} H{self.heads} S{self.tokens} D{self.head_dim} block{self.block} {dtype}"

    @property
    def name(self) -> str:
        limit = "" if self.valid_keys is None else f" kv_len={self.valid_keys}"
        return f"{self.shape} rows={self.rows:g} tiles={self.tiles:g}{limit}"


@dataclass(frozen=True)
class Inputs:
    """Random symbols of a case, their plan, and the generator of its tensors."""

    case: Case
    rows: torch.Tensor  # bool [B, H, T]
    tiles: torch.Tensor  # bool [B, H, T, T]; False in reused rows
    symbols: SparseSymbols
    plan: AttentionPlan
    generator: torch.Generator
    attends: Attends | None = None  # with masks: which pairs of a tile that computes attend

    @cached_property
    def computed(self) -> torch.Tensor:
        """Which (token, head) pairs compute, bool ``[B, S, H]``."""
        return self.rows.repeat_interleave(self.case.block, 2)[:, :, : self.case.tokens].transpose(1, 2)

    @cached_property
    def row_density(self) -> float:
        """Share of rows that compute, as drawn."""
        return self.rows.double().mean().item()

    @cached_property
    def density(self) -> float:
        """Share of tiles that compute, as drawn."""
        return self.tiles.double().mean().item()

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.generator.device) * scale
        return values.to(self.case.dtype if dtype is None else dtype)

    def features(self) -> torch.Tensor:
        """Normal ``[B, S, H, D]``."""
        return self.normal(self.case.batch, self.case.tokens, self.case.heads, self.case.head_dim)


def make_inputs(case: Case, device: str | torch.device, *, seed: int = 0) -> Inputs:
    """Random symbols: the case's share of all rows compute, and each tile of theirs with its probability."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks = block_count(case.tokens, case.block)
    shape = (case.batch, case.heads, blocks)
    count = math.prod(shape)
    rows = torch.randperm(count, generator=generator, device=device).view(shape) < round(case.rows * count)
    tiles = torch.rand((*shape, blocks), generator=generator, device=device) < case.tiles
    symbols = pack_symbols(case, rows, tiles)
    return Inputs(case, rows, tiles & rows[..., None], symbols, kernels.lower(symbols), generator)


def pack_symbols(case: Case, rows: torch.Tensor, tiles: torch.Tensor, masks: TileMasks | None = None) -> SparseSymbols:
    """bool ``[B, H, T]`` and ``[B, H, T, T]`` as symbols, packed by the reference."""
    cache_bits = kernels.pack_bits(rows.transpose(1, 2), backend="reference")
    skip_bits = kernels.pack_bits(tiles, backend="reference")
    return SparseSymbols(cache_bits, skip_bits, case.heads, case.tokens, case.block, masks)


def make_masked_inputs(
    case: Case, attends: Attends, device: str | torch.device, symbols: SparseSymbols | None = None
) -> Inputs:
    """Symbols of a mask over (query, key) pairs, the same for all samples and heads; every row computes.

    ``symbols``: those of that mask, where they are known; None = made from all pairs.
    """
    if symbols is None:
        position = torch.arange(case.tokens, device=device)
        pairs = attends(position[:, None], position[None])[None, None]
        symbols = symbols_from_mask(pairs, block=case.block, batch=case.batch, heads=case.heads)
    rows = torch.ones(case.batch, case.heads, symbols.blocks, dtype=torch.bool, device=device)
    tiles = kernels.unpack_bits(symbols.skip_bits, symbols.blocks, backend="reference")
    generator = torch.Generator(device).manual_seed(0)
    return Inputs(case, rows, tiles, symbols, kernels.lower(symbols), generator, attends)


def causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A query attends to itself and to earlier keys."""
    return key <= query


def documents(tokens: int, mean_length: int, device: str | torch.device) -> Attends:
    """A query attends to the keys of its own segment; segments are of random lengths, not aligned to blocks."""
    generator = torch.Generator().manual_seed(0)
    is_first = torch.rand(tokens, generator=generator) < 1 / mean_length
    document = is_first.cumsum(0).to(device)
    return lambda query, key: document[query] == document[key]
