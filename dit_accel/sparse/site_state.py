"""What one attention site remembers in one branch, and how much memory its symbols take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import torch

from dit_accel.kernels.layout import TokenLayout, block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.loop.forecast import History
from dit_accel.loop.memory import MemoryPlan, ModelSize
from dit_accel.loop.storage import Kept
from dit_accel.presets import Preset, Skip
from dit_accel.sparse.probe import adjusted

KEPT_TILES = 1 << 20  # a plan lists every tile in 4 bytes; longer ones are lowered again at each use


@dataclass
class SiteState:
    """What one transformer block remembers in one branch.

    Args:
        features: whole outputs (attention, MLP) by name, before their gates; for level layer and for degraded layers.
        attention: attention outputs O ``[B, S, H, D]``, for the cached biases of the next UPDATE.
        symbols, plan: what a DISPATCH step computes, packed and lowered.
        tiles: symbols of the skip policy, every row computing, drawn at step ``tiles_step`` and kept for later ones.
        residual: dense attention at step ``tiles_step`` less what is left of it under these tiles, ``[B, S, H, D]``.
        growth: of what the skip policy may leave out, as the probe has found it; for the next masks.
        tiles_growth: that under which the latest masks were drawn.
        probe_turn: how often the probe has measured.
        bias_stack: B_m ``[M, B, S, N]`` under these symbols, recorded at ``bias_coordinates``, newest first.
        bias_mask64: the computed heads, which B_m leaves out, as the plan's ``mask64``.
        bias_density: share of rows that the latest UPDATE projected for each of B_1 and older.
        row_density, tile_density: shares of rows, and of tiles over all rows, that a DISPATCH step computes.
        row_block_density: share of row-blocks in which it computes any head.
        attended: share of tiles that the latest computed step attended to.
        measured_step: the latest step in which these shares were measured.
        probed: share of queries on which the probe measured then.
        degraded: the layer is forecast whole until the next UPDATE.
    """

    features: dict[str, History] = field(default_factory=dict)
    attention: History | None = None
    symbols: SparseSymbols | None = None
    plan: AttentionPlan | None = None
    tiles: SparseSymbols | None = None
    tiles_step: int = -1
    residual: Kept | None = None
    growth: float = 1.0
    tiles_growth: float = 1.0
    probe_turn: int = 0
    bias_stack: Kept | None = None
    bias_coordinates: tuple[float, ...] = ()
    bias_mask64: torch.Tensor | None = None
    bias_density: float = 0.0
    row_density: float = 1.0
    row_block_density: float = 1.0
    tile_density: float = 1.0
    attended: float = 1.0
    measured_step: int = -1
    probed: float = 0.0
    degraded: bool = False

    def history(self, feature: str, memory: MemoryPlan) -> History:
        """Of a whole feature."""
        return self.features.setdefault(feature, History(memory.order + 1, memory.features))

    def tighten(self, error: float, target: float) -> None:
        """Takes the probe's error into account; masks that pass the target are not kept for later steps."""
        self.growth = adjusted(self.tiles_growth, error, target)
        if not error <= target:
            self.tiles = None

    def adopt(self, memory: MemoryPlan, size: ModelSize) -> None:
        """Goes on under another memory plan; what is there is converted."""
        values = memory.order + 1
        for history in self.features.values():
            history.adopt(values, memory.features)
        if self.attention is not None:
            self.attention.adopt(memory.order, memory.attention(size.layout))
        if self.residual is not None:
            self.residual = memory.features.keep(self.residual.read())
        if self.bias_stack is not None:
            self.bias_stack = memory.biases.keep(self.bias_stack.read()[:values].clone())
            self.bias_coordinates = self.bias_coordinates[:values]

    def fetch(self) -> None:
        """Starts to bring attention outputs that lie in host memory to the device."""
        if self.attention is not None:
            self.attention.fetch()

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lies on the device."""
        symbols = self.symbols, self.plan, self.tiles
        for holder in (*self.features.values(), self.attention, *symbols, self.residual, self.bias_stack):
            yield from holder.tensors() if holder is not None else ()
        if self.bias_mask64 is not None:
            yield self.bias_mask64

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """What lies in host memory instead."""
        if self.attention is not None:
            yield from self.attention.host_tensors()


def state_name(site: str, sample: int) -> str:
    """By which a branch keeps a site's state, of its own for each sample where a model attends to each apart."""
    return f"{site}, sample {sample + 1}" if sample else site


def states_of(sites: Mapping[str, Any], site: str) -> Iterator[SiteState]:
    """A site's states among a branch's, sample by sample."""
    names = (state_name(site, sample) for sample in count())
    return takewhile(lambda state: isinstance(state, SiteState), map(sites.get, names))


def symbol_bytes(preset: Preset, layout: TokenLayout, batch: int, heads: int) -> int:
    """One site's symbols under a preset, and their plan where it is kept."""
    blocks = layout.blocks
    rows = batch * heads * blocks
    symbols = batch * blocks * block_count(heads, 8)
    symbols += rows * max(_row_bytes(variant, layout) for variant in preset.skip.variants)
    if preset.forecast.level != "head":
        return symbols
    if any(variant.refresh > 1 for variant in preset.skip.variants):  # a FULL step's masks, beside the last UPDATE's
        symbols *= 2
    words = 8 * batch * blocks  # of the plan, and of the symbols that the cached biases are made under
    if rows * blocks > KEPT_TILES:
        return symbols + words
    lists = rows * blocks + 3 * rows + batch * heads + 1  # int32
    policies = {variant.policy for variant in preset.skip.variants}
    lists += (2 * rows + 1) * ("fg_attn" in policies) + rows * ("static" in policies)
    return symbols + 4 * lists + words


def _row_bytes(skip: Skip, layout: TokenLayout) -> int:
    """Bytes of one row of a head: of tiles, of tiles for linear attention, of single keys."""
    tiles = block_count(layout.blocks, 8)
    keys = layout.blocks * layout.block // 8
    return {"none": 0, "sla": 2 * tiles, "fg_attn": tiles + keys}.get(skip.policy, tiles)
