"""What a denoising run remembers: by branch, by block within a branch, and for the call in progress."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.loop.forecast import History
from dit_accel.loop.memory import MemoryPlan, ModelSize
from dit_accel.loop.rows import Rows
from dit_accel.loop.storage import PLAIN, Kept
from dit_accel.loop.tracker import StepMode, Tick
from dit_accel.sparse.probe import adjusted

NO_SLOPE = 2.0**-20  # above 0, so that a forecast which follows none of the slope counts as one that might


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
    degraded: bool = False

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


@dataclass
class PromptState:
    """What forecasts of some samples' outputs rest on: of one prompt's, or of a whole batch's.

    Args:
        order: degree of its forecasts at present.
        rows: its samples in the batch; None = all of them.
        damped: degree between 0 and 1 that would have fitted the newest output best; None = not known, or not below 1.
        outputs: the transformer's outputs.
        computed_step: the latest that computed.
        forecast_steps: those since then.
    """

    order: float
    rows: Rows = None
    damped: float | None = None
    outputs: History = field(init=False)
    computed_step: int = -1
    forecast_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = History(self.order + 1)

    def go_on_with(self, judged: float, beyond: float) -> None:
        """Forecasts are of the degree that was judged best and, where it is a whole one, go so far beyond it."""
        self.order = min(judged + beyond, self.outputs.order) if judged == int(judged) else judged

    def refit(self, share: float) -> None:
        """Takes the share of the slope that would have fitted best; damped forecasts go on with it."""
        fitted = min(max(share, NO_SLOPE), 1.0) if math.isfinite(share) else None
        if self.order == self.damped and fitted is not None:
            self.order = fitted
        self.damped = fitted if fitted != 1.0 else None


@dataclass(frozen=True)
class Judgement:
    """What a computed output tells of the forecasts that there would have been; tensors are float32 ``[]``.

    Args:
        nodes: coordinates that they rest on, newest first.
        errors: what they would have missed, by their degree.
        damped: the share of the slope by which one would have missed least; None = it is not asked for.
    """

    nodes: tuple[float, ...]
    errors: dict[float, torch.Tensor]
    damped: torch.Tensor | None

    @property
    def measured(self) -> list[torch.Tensor]:
        """Its tensors, for the host to read."""
        return [*self.errors.values(), *([] if self.damped is None else [self.damped])]


@dataclass
class BranchState:
    """What one CFG stream of one transformer remembers within a run.

    Args:
        shapes: of the tensors that its calls get.
        size: what they make the blocks remember.
        memory: how that is kept.
        prompts: what is remembered of outputs, apart for all whose steps are decided apart.
        updated: blocks remember what a DISPATCH call needs.
        structure: how the transformer's output nests its tensors.
    """

    shapes: tuple
    size: ModelSize
    memory: MemoryPlan
    prompts: list[PromptState]
    sites: dict[str, SiteState] = field(default_factory=dict)
    updated: bool = False
    structure: object = None

    @property
    def order(self) -> int:
        """Degree of the forecasts inside of blocks, which know of no prompts."""
        return self.prompts[0].order

    def adopt(self, memory: MemoryPlan) -> None:
        """Goes on under another memory plan; what is there is converted."""
        if memory != self.memory:
            for prompt in self.prompts:
                prompt.outputs.adopt(memory.order + 1, PLAIN)
                prompt.order = min(prompt.order, memory.order)
            for site in self.sites.values():
                site.adopt(memory, self.size)
            self.memory = memory

    def fetch_after(self, name: str | None) -> None:
        """Starts to bring the attention history of the site behind ``name`` (None: the first) to the device."""
        names = list(self.sites)
        following = 0 if name is None else names.index(name) + 1
        for site in names[following : following + 1]:
            if (history := self.sites[site].attention) is not None:
                history.fetch()

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lies on the device."""
        for prompt in self.prompts:
            yield from prompt.outputs.tensors()
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
        modes: the same of each prompt of the branch; ``mode`` is that of the prompt that computes most.
        coordinates: of all steps of the run, on which forecasts run: step indices or sigmas.
        progress: step / steps, for the policies' ramp.
        records: blocks must remember what they compute, because a later DISPATCH step may need it.
        skips: attention leaves tiles out though the call computes.
        work: by block, (computed, plain) FLOPs; an adapter fills it.
        dense: blocks that fell back to their own forward.
        densities: by block, float32 ``[6]`` on the device, read at the end of the call: of new symbols the density of
            rows, row-blocks and tiles, the share of tiles that this call attends to, ``bias_density``, and the probe's
            error.
        probed: by block, the share of queries on which the probe has measured; none where it has not.
        judgements: by prompt, of its computed output; on the device, read with the densities.
    """

    transformer: str
    mode: StepMode
    modes: tuple[StepMode, ...]
    tick: Tick
    coordinates: Sequence[float]
    branch: BranchState
    records: bool
    skips: bool = False
    work: dict[str, tuple[float, float]] = field(default_factory=dict)
    densities: dict[str, torch.Tensor] = field(default_factory=dict)
    probed: dict[str, float] = field(default_factory=dict)
    judgements: dict[int, Judgement] = field(default_factory=dict)
    dense: set[str] = field(default_factory=set)

    @property
    def computing(self) -> list[int]:
        """Places in ``branch.prompts`` of those that compute whole."""
        return [place for place, mode in enumerate(self.modes) if mode is not StepMode.DISPATCH]

    @property
    def computed_rows(self) -> tuple[int, ...] | None:
        """Samples that compute, prompt by prompt; None = the whole batch as it is."""
        if len(self.computing) == len(self.modes):
            return None
        return tuple(row for place in self.computing for row in self.branch.prompts[place].rows)

    @property
    def computed_share(self) -> float:
        """Of the samples: those that a call that computes computes; 1 where it forecasts all of them."""
        rows = self.computed_rows
        if rows is None or not rows:
            return 1.0
        return len(rows) / sum(len(prompt.rows) for prompt in self.branch.prompts)

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
