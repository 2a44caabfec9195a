"""Cases to check and time: sizes, computed shares, random tensors and random symbols."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.plans.tile_masks import symbols_from_mask
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols

Attends = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (query, key) positions, broadcast -> bool
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One size and sparsity; ``rows`` and ``tiles`` are the computed shares."""

    tokens: int
    heads: int = 24
    head_dim: int = 128
    block: int = 128
    batch: int = 1
    rows: float = 1.0
    tiles: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    valid_keys: int | None = None

    AXES: ClassVar = ("tokens", "heads", "head_dim", "block")

    @property
    def axes(self) -> dict[str, int]:
        """Axes that results name, with their lengths."""
        return {name: getattr(self, name) for name in self.AXES}

    @property
    def shape(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"B{self.batch} H{self.heads} S{self.tokens} D{self.head_dim} block{self.block} {dtype}"

    @property
    def name(self) -> str:
        limit = "" if self.valid_keys is None else f" kv_len={self.valid_keys}"
        return f"{self.shape} rows={self.rows:g} tiles={self.tiles:g}{limit}"


@dataclass(frozen=True)
class Projection(Case):
    """GEMM-Q from ``width`` to the heads, and GEMM-O from the heads to ``width``; every tile is computed.

    ``is_slice``: GEMM-O's weight is the attention part of a wider, fused matrix. ``windows``: time whole windows too.
    """

    width: int = 3072
    is_slice: bool = False
    windows: bool = True

    AXES: ClassVar = ("tokens", "heads", "head_dim", "width")

    @property
    def features(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def flops(self) -> float:
        """FLOPs of the dense product."""
        return 2.0 * self.tokens * self.width * self.features


@dataclass(frozen=True)
class Inputs:
    """Symbols and plan of a case, with the random generator of its tensors."""

    case: Case
    rows: torch.Tensor  # bool [B, H, T]
    tiles: torch.Tensor  # bool [B, H, T, T]; False in reused rows
    symbols: SparseSymbols
    plan: AttentionPlan
    generator: torch.Generator
    attends: Attends | None = None  # with masks: attended pairs within computed tiles

    @cached_property
    def computed(self) -> torch.Tensor:
        """Mask of computed (token, head) pairs, bool ``[B, S, H]``."""
        return self.rows.repeat_interleave(self.case.block, 2)[:, :, : self.case.tokens].transpose(1, 2)

    @cached_property
    def row_density(self) -> float:
        """Share of computed rows among the random ones."""
        return self.rows.double().mean().item()

    @cached_property
    def density(self) -> float:
        """Share of computed tiles among the random ones."""
        return self.tiles.double().mean().item()

    @property
    def kv_len(self) -> torch.Tensor | None:
        """Number of valid keys of the case, int32 ``[B]``."""
        case = self.case
        if case.valid_keys is None:
            return None
        return torch.full((case.batch,), case.valid_keys, dtype=torch.int32, device=self.tiles.device)

    def tokens_of(self, block: int) -> slice:
        return slice(block * self.case.block, min((block + 1) * self.case.block, self.case.tokens))

    def keys_of(self, sample: int, head: int, row: int) -> torch.Tensor:
        """Positions of the valid keys in a row's tiles, and of its single keys, ascending."""
        is_key = self.tiles[sample, head, row].repeat_interleave(self.case.block)
        if self.symbols.slice_bits is not None:
            is_key |= kernels.unpack_bits(self.symbols.slice_bits[sample, head, row], len(is_key), backend="reference")
        return is_key[: self.case.tokens][: self.case.valid_keys].nonzero().flatten()

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.generator.device) * scale
        return values.to(self.case.dtype if dtype is None else dtype)

    def features(self) -> torch.Tensor:
        """Normal ``[B, S, H, D]``."""
        return self.normal(self.case.batch, self.case.tokens, self.case.heads, self.case.head_dim)

    def qkv(self) -> QKV:
        return self.features(), self.features(), self.features()

    def norm_and_rope(self) -> dict[str, Any]:
        """Arguments of GEMM-Q with fused norm and rotation."""
        angle = self.normal(self.case.tokens, self.case.head_dim // 2, dtype=torch.float32).repeat_interleave(2, -1)
        return {"norm_weight": self.normal(self.case.head_dim), "rope": (angle.cos(), angle.sin())}


def make_inputs(case: Case, device: str | torch.device, *, seed: int = 0) -> Inputs:
    """Choose random symbols: an exact share of rows is computed, and each of their tiles with a fixed probability."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks = block_count(case.tokens, case.block)
    shape = (case.batch, case.heads, blocks)
    count = math.prod(shape)
    rows = torch.randperm(count, generator=generator, device=device).view(shape) < round(case.rows * count)
    tiles = torch.rand((*shape, blocks), generator=generator, device=device) < case.tiles
    cache_bits = kernels.pack_bits(rows.transpose(1, 2), backend="reference")
    skip_bits = kernels.pack_bits(tiles, backend="reference")
    symbols = SparseSymbols(cache_bits, skip_bits, case.heads, case.tokens, case.block)
    return Inputs(case, rows, tiles & rows[..., None], symbols, kernels.lower(symbols), generator)


def masked_inputs(case: Case, attends: Attends, device: str | torch.device) -> Inputs:
    """Inputs for a mask given pair by pair, the same for all samples and heads."""
    position = torch.arange(case.tokens, device=device)
    pairs = attends(position[:, None], position[None])[None, None]
    symbols = symbols_from_mask(pairs, block=case.block, batch=case.batch, heads=case.heads)
    rows = torch.ones(case.batch, case.heads, symbols.blocks, dtype=torch.bool, device=device)
    tiles = kernels.unpack_bits(symbols.skip_bits, symbols.blocks, backend="reference")
    return Inputs(case, rows, tiles, symbols, kernels.lower(symbols), torch.Generator(device).manual_seed(0), attends)


def causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Let a query attend to itself and to earlier keys."""
    return key <= query


def documents(tokens: int, mean_length: int, device: str | torch.device) -> Attends:
    """Let a query attend to the keys of its own segment; segments have random lengths, not aligned to blocks."""
    generator = torch.Generator().manual_seed(0)
    is_first = torch.rand(tokens, generator=generator) < 1 / mean_length
    document = is_first.cumsum(0).to(device)
    return lambda query, key: document[query] == document[key]
