"""What a denoising run remembers: by branch, by block within a branch, and for the call in progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dit_accel.forecast import History
from dit_accel.schedule import StepMode, Tick
from dit_accel.symbols import AttentionPlan, SparseSymbols


@dataclass
class SiteState:
    """What one transformer block remembers in one branch.

    Args:
        features: whole outputs (attention, MLP) by name, before their gates; for scope layer and for degraded layers.
        attention: attention outputs O ``[B, S, H, D]``, for the cached bias.
        symbols, plan: what a DISPATCH step computes, packed and lowered.
        bias_stack: B_m ``[M, B, S, N]`` under these symbols, recorded at ``bias_coordinates``.
        row_density, tile_density: shares of rows, and of tiles over all rows, that compute.
        degraded: the layer is forecast whole until the next UPDATE.
    """

    features: dict[str, History] = field(default_factory=dict)
    attention: History | None = None
    symbols: SparseSymbols | None = None
    plan: AttentionPlan | None = None
    bias_stack: torch.Tensor | None = None
    bias_coordinates: tuple[float, ...] = ()
    row_density: float = 1.0
    tile_density: float = 1.0
    degraded: bool = False

    def tensors(self) -> Iterator[torch.Tensor]:
        for history in (*self.features.values(), *([self.attention] if self.attention is not None else [])):
            yield from history.tensors()
        for holder in (self.symbols, self.plan):
            yield from holder.tensors() if holder is not None else ()
        if self.bias_stack is not None:
            yield self.bias_stack


@dataclass
class BranchState:
    """What one CFG stream of one transformer remembers within a run.

    Args:
        shapes: of the tensors that its calls get.
        outputs: the transformer's outputs.
        order: degree of its forecasts at present.
        updated: blocks remember what a DISPATCH call needs.
        structure: how the transformer's output nests its tensors.
    """

    shapes: tuple
    outputs: History
    order: int
    sites: dict[str, SiteState] = field(default_factory=dict)
    updated: bool = False
    structure: object = None

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.outputs.tensors()
        for site in self.sites.values():
            yield from site.tensors()


@dataclass
class Call:
    """One transformer call: its mode, and the state that its blocks read and write.

    Args:
        coordinates: of all steps of the run, on which forecasts run: step indices or sigmas.
        progress: step / steps, for the policies' ramp.
        records: blocks must remember what they compute, because a later DISPATCH step may need it.
        work: by block, (computed, plain) FLOPs; an adapter fills it.
        dense: blocks that fell back to their own forward.
        densities: by block, device scalars (row density, tile density) of new symbols, read at the end of the call.
    """

    transformer: str
    mode: StepMode
    tick: Tick
    coordinates: Sequence[float]
    branch: BranchState
    records: bool
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
