"""What a denoising run remembers: by branch of classifier-free guidance, and for the call in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch

from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.closed_loop import ClosedLoop, Course
from dit_accel.loop.conditioning import Conditioning
from dit_accel.loop.memory import MemoryPlan, ModelSize
from dit_accel.loop.report import RunReport
from dit_accel.loop.tracker import StepMode, Tick


class Memory(Protocol):
    """What a transformer block remembers in one branch; the loop keeps it and does not look inside."""

    def adopt(self, memory: MemoryPlan, size: ModelSize) -> None:
        """Goes on under another memory plan; what is there is converted."""

    def fetch(self) -> None:
        """Starts to bring what lies in host memory, and an UPDATE reads, to the device."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lies on the device."""

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """What lies in host memory instead."""


Kind = TypeVar("Kind", bound=Memory)


@dataclass
class BranchState:
    """What one branch of one transformer remembers within a run.

    Args:
        name: of the branch, as the pipeline calls it or by the order of calls in a step.
        shapes: of the tensors that its calls get, and what tells the form of their output.
        size: what they make the blocks remember.
        memory: how that is kept.
        loops: one for all samples whose steps are decided apart.
        sites: what blocks remember, by name.
        updated: blocks remember what a DISPATCH call needs.
        structure: how the transformer's output nests its tensors.
        plain: FLOPs of each block in a plain call, of which the second number takes pairs of queries and keys.
        conditioning: of its calls.
    """

    name: str
    shapes: tuple
    size: ModelSize
    memory: MemoryPlan
    loops: list[ClosedLoop]
    sites: dict[str, Memory] = field(default_factory=dict)
    updated: bool = False
    structure: Any = None
    plain: dict[str, tuple[float, float]] = field(default_factory=dict)
    conditioning: Conditioning = field(default_factory=Conditioning)

    @property
    def order(self) -> float:
        """Degree of the forecasts inside of blocks, which know of no samples."""
        return self.loops[0].order

    def adopt(self, memory: MemoryPlan) -> None:
        """Goes on under another memory plan; what is there is converted."""
        if memory != self.memory:
            for loop in self.loops:
                loop.adopt(memory.order)
            for site in self.sites.values():
                site.adopt(memory, self.size)
            self.memory = memory

    def fetch_after(self, name: str | None) -> None:
        """Starts to bring what the site behind ``name`` (None: the first) reads at an UPDATE to the device."""
        names = list(self.sites)
        following = 0 if name is None else names.index(name) + 1
        for site in names[following : following + 1]:
            self.sites[site].fetch()

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lies on the device."""
        for loop in self.loops:
            yield from loop.outputs.tensors()
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
        modes: the same of each loop of the branch; ``mode`` is that of the loop that computes most.
        course: the run's steps as the loop sees them.
        progress: step / steps, for the policies' ramp.
        records: blocks must remember what they compute, because a later DISPATCH step may need it.
        skips: attention leaves tiles out though the call computes, and so runs at its sites at any level.
        forecasts_output: the whole output is forecast, so no block runs.
        place: of the branch among those that were called in this step.
        report: of the run.
        facts: of a call whose blocks run, for the transformer's driver.
        work: FLOPs of each block that ran, of which the second number took pairs of queries and keys; the driver fills
            it.
        dense: blocks that fell back to their own forward.
        symbols: that blocks drew in this call, by name.
        densities: what their attentions measured of them, float32 on the device, by name.
        measured: what the host reads at the end of the call, all of it at once: float32 tensors, and what takes their
            numbers then.
    """

    transformer: str
    mode: StepMode
    modes: tuple[StepMode, ...]
    tick: Tick
    course: Course
    branch: BranchState
    records: bool
    report: RunReport
    skips: bool = False
    forecasts_output: bool = False
    place: int = 0
    facts: Any = None
    work: dict[str, tuple[float, float]] = field(default_factory=dict)
    dense: set[str] = field(default_factory=set)
    symbols: dict[str, SparseSymbols] = field(default_factory=dict)
    densities: dict[str, torch.Tensor] = field(default_factory=dict)
    measured: list[tuple[Sequence[torch.Tensor], Callable[[list[float]], None]]] = field(default_factory=list)

    @cached_property
    def computing(self) -> list[int]:
        """Places in ``branch.loops`` of the loops that compute whole."""
        return [place for place, mode in enumerate(self.modes) if mode is not StepMode.DISPATCH]

    @cached_property
    def computed_rows(self) -> tuple[int, ...] | None:
        """Samples that compute, in the order of the batch, by which models know parts of guidance; None = all of it."""
        if len(self.computing) == len(self.modes):
            return None
        return tuple(sorted(row for place in self.computing for row in self.branch.loops[place].rows or ()))

    @cached_property
    def computed_share(self) -> float:
        """Share of the samples that compute; 1 in a call that forecasts all of them."""
        rows = self.computed_rows
        return len(rows) / sum(len(loop.rows or ()) for loop in self.branch.loops) if rows else 1.0

    @property
    def coordinate(self) -> float:
        """Where this step's forecasts are evaluated and its features recorded."""
        return self.course.coordinates[self.tick.step]

    @property
    def progress(self) -> float:
        return self.tick.step / self.tick.steps

    def site(self, name: str, kind: Callable[[], Kind]) -> Kind:
        """What a block remembers in this branch; made by ``kind`` when it is first asked for."""
        return self.branch.sites.setdefault(name, kind())  # type: ignore[return-value]

    def measure(self, numbers: Sequence[torch.Tensor], take: Callable[[list[float]], None]) -> None:
        """Has ``take`` called with these numbers once the host has read them."""
        self.measured.append((numbers, take))
