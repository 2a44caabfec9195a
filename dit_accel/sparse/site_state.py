"""State of a transformer block and its attention in one branch, and the memory of symbols."""

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
    """Measurements of a site's new symbols: shares and an error, as numbers or float32 ``[1]`` on the device."""

    rows: Number  # that a DISPATCH step computes
    row_blocks: Number  # in which a DISPATCH step computes any head
    tiles: Number  # over all rows, that a DISPATCH step computes
    attended: Number  # tiles that this computed step attends to
    projected: Number  # rows that this UPDATE projects for each of B_1 and older
    error: Number  # that the probe measured; 0 without a measurement


EVERYTHING = Densities(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)


@dataclass
class TileState:
    """State of a tile site."""

    symbols: SparseSymbols | None = None  # of the latest call; at level head those of DISPATCH steps
    densities: Densities[float] = EVERYTHING  # of these symbols, as read in step `measured_step`
    measured_step: int = -1
    kept: SparseSymbols | None = None  # masks of step `drawn_step` for later steps; every row computes
    drawn_step: int = -1
    residual: StoredTensor | None = None  # dense minus sparse attention under `kept`, [B, S, H, D]
    growth: float = 1.0  # of the next masks, found by the probe
    drawn_growth: float = 1.0  # of the latest masks
    probe_turn: int = 0
    probed: float = 0.0  # share of the queries that the probe measured in the latest step

    def tighten(self, error: float, target: float) -> None:
        """Adjust the growth to the probe's error; masks with an error above the target are not kept for later steps."""
        self.growth = adjusted(self.drawn_growth, error, target)
        if not error <= target:
            self.kept = None


@dataclass
class HeadState:
    """Additional state of a head site."""

    attention: StoredHistory | None = None  # outputs O [B, S, H, D], for the cached biases of the next UPDATE
    plan: AttentionPlan | None = None  # of DISPATCH steps; None = it is large, and is lowered again at each use
    bias_stack: StoredTensor | None = None  # B_m [M, B, S, N] under this plan, newest first
    bias_coordinates: tuple[float, ...] = ()
    bias_mask64: torch.Tensor | None = None  # the computed heads, which B_m leaves out
    degraded: bool = False  # the layer is forecast whole until the next UPDATE


@dataclass
class SiteState:
    """State of one transformer block in one branch."""

    # Whole outputs (attention, MLP) by name, before their gates; for level layer and for degraded layers.
    features: dict[str, StoredHistory] = field(default_factory=dict)
    tiles: TileState = field(default_factory=TileState)
    heads: HeadState = field(default_factory=HeadState)

    def history(self, feature: str, memory: MemoryPlan) -> StoredHistory:
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
