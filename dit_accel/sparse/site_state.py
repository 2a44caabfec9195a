"""State of a transformer block and its attention in one branch, and the memory of symbols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from dit_accel.kernels.layout import TokenLayout, block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.loop.memory import MemoryPlan, ModelSize
from dit_accel.loop.storage import StoredHistory, StoredTensor
from dit_accel.presets import Preset
from dit_accel.sparse.policies import policy_of
from dit_accel.sparse.probe import adjusted

KEPT_TILES = 1 << 20  # a plan takes 4 bytes a tile; larger plans are lowered again at each use


Number = TypeVar("Number", float, torch.Tensor)


class Densities(NamedTuple, Generic[Number]):
    """Measurements of a site's new symbols: numbers, or float32 ``[1]`` on the device.

    All but ``error`` are shares of the whole.

    Args:
        rows, tiles: rows, and tiles over all rows, that a DISPATCH step computes.
        row_blocks: row-blocks in which a DISPATCH step computes any head.
        attended: tiles that this computed step attends to.
        projected: rows that this UPDATE projects for each of B_1 and older.
        error: error that the probe measured; 0 without a measurement.
    """

    rows: Number
    row_blocks: Number
    tiles: Number
    attended: Number
    projected: Number
    error: Number


EVERYTHING = Densities(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)


@dataclass
class TileState:
    """State of a tile site.

    Args:
        symbols: symbols of the latest call; at level head the symbols of DISPATCH steps.
        densities: densities of these symbols, which the host read in step ``measured_step``.
        kept: symbols of the skip policy, under which every row computes; computed at step ``drawn_step`` and kept for
            later steps.
        residual: dense attention at step ``drawn_step`` minus sparse attention under these tiles, ``[B, S, H, D]``.
        growth: growth that the probe found, for the next masks; see :mod:`~dit_accel.sparse.probe`.
        drawn_growth: growth of the latest masks.
        probe_turn: number of the probe's measurements.
        probed: share of the queries that the probe measured in the latest step.
    """

    symbols: SparseSymbols | None = None
    densities: Densities[float] = EVERYTHING
    measured_step: int = -1
    kept: SparseSymbols | None = None
    drawn_step: int = -1
    residual: StoredTensor | None = None
    growth: float = 1.0
    drawn_growth: float = 1.0
    probe_turn: int = 0
    probed: float = 0.0

    def tighten(self, error: float, target: float) -> None:
        """Adjust the growth to the probe's error; masks with an error above the target are not kept for later steps."""
        self.growth = adjusted(self.drawn_growth, error, target)
        if not error <= target:
            self.kept = None


@dataclass
class HeadState:
    """Additional state of a head site.

    Args:
        attention: attention outputs O ``[B, S, H, D]``, for the cached biases of the next UPDATE.
        plan: the lowered symbols of DISPATCH steps; None = the plan is large, and is lowered again at each use.
        bias_stack: B_m ``[M, B, S, N]`` under these symbols, recorded at ``bias_coordinates``, newest first.
        bias_mask64: the computed heads, which B_m leaves out, as the plan's ``mask64``.
        degraded: the layer is forecast whole until the next UPDATE.
    """

    attention: StoredHistory | None = None
    plan: AttentionPlan | None = None
    bias_stack: StoredTensor | None = None
    bias_coordinates: tuple[float, ...] = ()
    bias_mask64: torch.Tensor | None = None
    degraded: bool = False


@dataclass
class SiteState:
    """State of one transformer block in one branch.

    Args:
        features: whole outputs (attention, MLP) by name, before their gates; for level layer and for degraded layers.
        tiles, heads: state of its attention.
    """

    features: dict[str, StoredHistory] = field(default_factory=dict)
    tiles: TileState = field(default_factory=TileState)
    heads: HeadState = field(default_factory=HeadState)

    def history(self, feature: str, memory: MemoryPlan) -> StoredHistory:
        """Return the history of a whole feature."""
        return self.features.setdefault(feature, StoredHistory(memory.order + 1, memory.features))

    def adopt(self, memory: MemoryPlan, size: ModelSize) -> None:
        """Change the memory plan and convert the existing records."""
        values, tiles, heads = memory.order + 1, self.tiles, self.heads
        for history in self.features.values():
            history.adopt(values, memory.features)
        if heads.attention is not None:
            heads.attention.adopt(memory.order, memory.attention(size.layout))
        if tiles.residual is not None:
            tiles.residual = memory.features.keep(tiles.residual.read())
        if heads.bias_stack is not None:
            heads.bias_stack = memory.biases.keep(heads.bias_stack.read()[:values].clone())
            heads.bias_coordinates = heads.bias_coordinates[:values]

    def fetch(self) -> None:
        """Start to copy attention outputs from host memory to the device."""
        if self.heads.attention is not None:
            self.heads.attention.fetch()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors on the device."""
        tiles, heads = self.tiles, self.heads
        symbols = tiles.symbols, heads.plan, tiles.kept
        for holder in (*self.features.values(), heads.attention, *symbols, tiles.residual, heads.bias_stack):
            yield from holder.tensors() if holder is not None else ()
        if heads.bias_mask64 is not None:
            yield heads.bias_mask64

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in host memory."""
        if self.heads.attention is not None:
            yield from self.heads.attention.host_tensors()


def state_name(site: str, sample: int) -> str:
    """Return the name of a site's state; each sample has its own if the model attends to samples separately."""
    return f"{site}, sample {sample + 1}" if sample else site


def states_of(sites: Mapping[str, Any], site: str) -> Iterator[SiteState]:
    """Yield the states of a site, sample by sample."""
    names = (state_name(site, sample) for sample in count())
    return takewhile(lambda state: isinstance(state, SiteState), map(sites.get, names))


def symbol_bytes(preset: Preset, layout: TokenLayout, batch: int, heads: int) -> int:
    """Return the bytes of one site's symbols under a preset, and of their plan if it is kept."""
    blocks = layout.blocks
    rows = batch * heads * blocks
    symbols = batch * blocks * block_count(heads, 8)
    policies = {policy_of(variant) for variant in preset.skip.variants}
    symbols += rows * max(policy.row_bytes(layout) for policy in policies)
    if preset.forecast.level != "head":
        return symbols
    if any(variant.refresh > 1 for variant in preset.skip.variants):  # masks of a FULL step and of an UPDATE
        symbols *= 2
    words = 8 * batch * blocks  # mask64 of the plan, and of the cached biases
    if rows * blocks > KEPT_TILES:
        return symbols + words
    lists = rows * blocks + 2 * rows + 1  # int32
    lists += sum(policy.plan_entries(rows) for policy in policies)
    return symbols + 4 * lists + words
