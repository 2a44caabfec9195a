"""What is checked and timed: sizes, shares that compute, and the random tensors and symbols drawn for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from dit_accel import kernels
from dit_accel.layout import block_count
from dit_accel.symbols import CAUSAL_TILE, FIRST_PARTIAL_TILE, FULL_TILE, AttentionPlan, SparseSymbols, TileMasks

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


def make_masked_inputs(case: Case, attends: Attends, device: str | torch.device) -> Inputs:
    """Symbols of a mask over (query, key) pairs, the same for all samples and heads; every row computes."""
    blocks = block_count(case.tokens, case.block)
    tiles, masks = tile_masks(attends, case.tokens, case.block, device)
    rows = torch.ones(case.batch, case.heads, blocks, dtype=torch.bool, device=device)
    tiles = tiles.expand(case.batch, case.heads, -1, -1).contiguous()
    symbols = pack_symbols(case, rows, tiles, masks)
    generator = torch.Generator(device).manual_seed(0)
    return Inputs(case, rows, tiles, symbols, kernels.lower(symbols), generator, attends)


def tile_masks(attends: Attends, tokens: int, block: int, device: str | torch.device) -> tuple[torch.Tensor, TileMasks]:
    """Which tiles hold a pair that attends, bool ``[T, T]``, and their masks; like masks share a pool entry."""
    blocks = block_count(tokens, block)
    position = torch.arange(blocks * block, device=device)
    is_causal = position[:block, None] >= position[:block]  # of a tile on the diagonal
    tiles = torch.zeros(blocks, blocks, dtype=torch.bool, device=device)
    codes = torch.full((1, 1, blocks, blocks), FULL_TILE, dtype=torch.int32, device=device)
    entries: dict[bytes, int] = {}
    pool: list[torch.Tensor] = []
    for row in range(blocks):
        query = position[row * block : (row + 1) * block, None]
        pairs = attends(query.clamp(max=tokens - 1), position.clamp(max=tokens - 1)[None])
        by_tile = pairs.unflatten(1, (blocks, block)).transpose(0, 1)  # [T, block, block]
        tiles[row] = by_tile.flatten(1).any(1)
        for column in (tiles[row] & ~by_tile.flatten(1).all(1)).nonzero().flatten().tolist():
            tile = by_tile[column]
            if row == column and torch.equal(tile, is_causal):
                codes[0, 0, row, column] = CAUSAL_TILE
                continue
            bits = kernels.pack_bits(tile, backend="reference")
            entry = entries.setdefault(bits.cpu().numpy().tobytes(), len(pool))
            if entry == len(pool):
                pool.append(bits)
            codes[0, 0, row, column] = FIRST_PARTIAL_TILE + entry
    stacked = torch.stack(pool) if pool else torch.zeros(0, block, block // 8, dtype=torch.uint8, device=device)
    return tiles, TileMasks(codes, stacked)


def causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A query attends to itself and to earlier keys."""
    return key <= query


def documents(tokens: int, mean_length: int, device: str | torch.device) -> Attends:
    """A query attends to the keys of its own segment; segments are of random lengths, not aligned to blocks."""
    generator = torch.Generator().manual_seed(0)
    is_first = torch.rand(tokens, generator=generator) < 1 / mean_length
    document = is_first.cumsum(0).to(device)
    return lambda query, key: document[query] == document[key]
