"""What a denoising run remembers: by branch, by block within a branch, and for the call in progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dit_accel.forecast import History
from dit_accel.memory import MemoryPlan, ModelSize
from dit_accel.schedule import StepMode, Tick
from dit_accel.storage import PLAIN, Kept
from dit_accel.symbols import AttentionPlan, SparseSymbols


@dataclass
class SiteState:
    """What one transformer block remembers in one branch.

    Args:
        features: whole outputs (attention, MLP) by name, before their gates; for scope layer and for degraded layers.
        attention: attention outputs O ``[B, S, H, D]``, for the cached biases of the next UPDATE.
        symbols, plan: what a DISPATCH step computes, packed and lowered.
        tiles: symbols of the skip policy, every row computing, drawn at step ``tiles_step`` and kept for later ones.
        bias_stack: B_m ``[M, B, S, N]`` under these symbols, recorded at ``bias_coordinates``, newest first.
        bias_mask64: the computed heads, which B_m leaves out, as the plan's ``mask64``.
        bias_density: share of rows that the latest UPDATE projected for each of B_1 and older.
        row_density, tile_density: shares of rows, and of tiles over all rows, that a DISPATCH step computes.
        row_block_density: share of row-blocks in which it computes any head.
        attended: share of tiles that the latest computed step attended to.
        degraded: the layer is forecast whole until the next UPDATE.
    """

    features: dict[str, History] = field(default_factory=dict)
    attention: History | None = None
    symbols: SparseSymbols | None = None
    plan: AttentionPlan | None = None
    tiles: SparseSymbols | None = None
    tiles_step: int = -1
    bias_stack: Kept | None = None
    bias_coordinates: tuple[float, ...] = ()
    bias_mask64: torch.Tensor | None = None
    bias_density: float = 0.0
    row_density: float = 1.0
    row_block_density: float = 1.0
    tile_density: float = 1.0
    attended: float = 1.0
    degraded: bool = False

    def adopt(self, memory: MemoryPlan, size: ModelSize) -> None:
        """Goes on under another memory plan; what is there is converted."""
        values = memory.order + 1
        for history in self.features.values():
            history.adopt(values, memory.features)
        if self.attention is not None:
            self.attention.adopt(memory.order, memory.attention(size.layout))
        if self.bias_stack is not None:
            self.bias_stack = memory.biases.keep(self.bias_stack.read()[:values].clone())
            self.bias_coordinates = self.bias_coordinates[:values]

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lies on the device."""
        symbols = self.symbols, self.plan, self.tiles
        for holder in (*self.features.values(), self.attention, *symbols, self.bias_stack):
            yield from holder.tensors() if holder is not None else ()
        if self.bias_mask64 is not None:
            yield self.bias_mask64

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """What lies in host memory instead."""
        if self.attention is not None:
            yield from self.attention.host_tensors()


@dataclass
class BranchState:
    """What one CFG stream of one transformer remembers within a run.

    Args:
        shapes: of the tensors that its calls get.
        size: what they make the blocks remember.
        memory: how that is kept.
        outputs: the transformer's outputs.
        order: degree of its forecasts at present.
        updated: blocks remember what a DISPATCH call needs.
        computed_step: the latest that computed.
        structure: how the transformer's output nests its tensors.
    """

    shapes: tuple
    size: ModelSize
    memory: MemoryPlan
    outputs: History = field(init=False)
    order: int = field(init=False)
    sites: dict[str, SiteState] = field(default_factory=dict)
    updated: bool = False
    computed_step: int = -1
    structure: object = None

    def __post_init__(self) -> None:
        self.order = self.memory.order
        self.outputs = History(self.order + 1)

    def adopt(self, memory: MemoryPlan) -> None:
        """Goes on under another memory plan; what is there is converted."""
        if memory != self.memory:
            self.outputs.adopt(memory.order + 1, PLAIN)
            for site in self.sites.values():
                site.adopt(memory, self.size)
            self.memory, self.order = memory, min(self.order, memory.order)

    def fetch_after(self, name: str | None) -> None:
        """Starts to bring the attention history of the site behind ``name`` (None: the first) to the device."""
        names = list(self.sites)
        following = 0 if name is None else names.index(name) + 1
        for site in names[following : following + 1]:
            if (history := self.sites[site].attention) is not None:
                history.fetch()

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lies on the device."""
        yield from self.outputs.tensors()
        for site in self.sites.values():
            yield from site.tensors()

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """What lies in host memory instead."""
        for site in self.sites.values():
            yield from site.host_tensors()


@dataclass
class Call:
    """One transformer call: its mode, and the state that its blocks read and write.

    Args:
        coordinates: of all steps of the run, on which forecasts run: step indices or sigmas.
        progress: step / steps, for the policies' ramp.
        records: blocks must remember what they compute, because a later DISPATCH step may need it.
        skips: attention leaves tiles out though the call computes.
        work: by block, (computed, plain) FLOPs; an adapter fills it.
        dense: blocks that fell back to their own forward.
        densities: by block, float32 ``[5]`` on the device, read at the end of the call: of new symbols the density of
            rows, row-blocks and tiles, the share of tiles that this call attends to, and ``bias_density``.
    """

    transformer: str
    mode: StepMode
    tick: Tick
    coordinates: Sequence[float]
    branch: BranchState
    records: bool
    skips: bool = False
    work: dict[str, tuple[float, float]] = field(default_factory=dict)
    densities: dict[str, torch.Tensor] = field(default_factory=dict)
    dense: set[str] = field(default_factory=set)

    @property
    def coordinate(self) -> float:
        """Where this step's forecasts are evaluated and its features recorded."""
        return self.coordinates[self.tick.step]

    @property
    def progress(self) -> float:
        return self.tick.step / self.tick.steps

    def site(self, name: str) -> SiteState:
        return self.branch.sites.setdefault(name, SiteState())

    def history(self, name: str, feature: str) -> History:
        """Of a whole feature of a block."""
        memory = self.branch.memory
        return self.site(name).features.setdefault(feature, History(memory.order + 1, memory.features))
