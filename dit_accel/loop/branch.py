"""State of a denoising run: of each branch of classifier-free guidance, and of the call in progress."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch

from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.closed_loop import ClosedLoop, Course
from dit_accel.loop.conditioning import Conditioning
from dit_accel.loop.memory import MemoryPlan, ModelSize
from dit_accel.loop.outputs import LoopPerOutput
from dit_accel.loop.report import RunReport
from dit_accel.loop.rows import Rows
from dit_accel.loop.timing import Stopwatch
from dit_accel.loop.tracker import Place, StepMode, Tick

WHOLE_BATCH: tuple[Rows, ...] = (None,)  # all samples are decided together


@dataclass
class Description:
    """A transformer call as its caller describes it. Subclasses give what the loop asks for at some calls only."""

    transformer: str  # its name in the pipeline
    context: str | None  # the pipeline's name of the branch; None = the order of the calls in a step decides
    timestep: torch.Tensor | float  # the timestep that the pipeline passes to the transformer
    # shapes of tensors except timesteps, and arguments that set the output's form; a change drops the run's records
    shapes: tuple
    place: Place | None = None  # the step, if the pipeline gives it
    # latents ``[B, …]`` of the call, for each output that has some; empty = edits are not detected
    latents: Sequence[torch.Tensor] = ()

    def size(self) -> ModelSize:
        """Return the numbers that determine the records' memory; asked for at a branch's first call."""
        return ModelSize()

    def samples(self) -> Sequence[Rows]:
        """Return the rows whose steps are decided separately; asked for at a branch's first call."""
        return WHOLE_BATCH

    def conditions(self) -> Mapping[str, Any]:
        """Return the conditioning besides latents and time; a change within a run drops the branch's records."""
        return {}


class SiteMemory(Protocol):
    """Records of one transformer block in one branch; the loop keeps them and does not read them."""

    def adopt(self, memory: MemoryPlan, size: ModelSize) -> None:
        """Change the memory plan and convert the existing records."""

    def fetch(self) -> None:
        """Start to copy the tensors that an UPDATE reads from host memory to the device."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors on the device."""

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in host memory."""


Kind = TypeVar("Kind", bound=SiteMemory)


@dataclass
class BranchState:
    """State of one branch of one transformer within a run."""

    name: str  # name of the branch, from the pipeline or from the order of calls in a step
    # shapes of the call's tensors except timesteps, and the arguments that determine the form of the output
    shapes: tuple
    size: ModelSize  # numbers that determine the memory of the blocks' records
    memory: MemoryPlan  # memory plan of these records
    loops: list[ClosedLoop | LoopPerOutput]  # one loop for each group of samples that are decided together
    sites: dict[str, SiteMemory] = field(default_factory=dict)  # records of the blocks, by name
    updated: bool = False  # True once the blocks have the records that a DISPATCH call needs
    structure: Any = None  # nesting of the tensors in the transformer's output
    # FLOPs of each block in a plain call: in total, and of its query-key pairs
    plain: dict[str, tuple[float, float]] = field(default_factory=dict)
    conditioning: Conditioning = field(default_factory=Conditioning)  # conditioning of the branch's calls
    # names of code inside the transformer whose state the latest computed call changed
    changed: set[str] = field(default_factory=set)
    unsettled: bool = False  # the next call computes, because this state may change with every call

    @property
    def order(self) -> float:
        """Degree of the forecasts inside of blocks, which treat all samples alike."""
        return self.loops[0].order

    def adopt(self, memory: MemoryPlan) -> None:
        """Change the memory plan and convert the existing records."""
        if memory != self.memory:
            for loop in self.loops:
                loop.adopt(memory.order)
            for site in self.sites.values():
                site.adopt(memory, self.size)
            self.memory = memory

    def fetch_after(self, name: str | None) -> None:
        """Start to copy the UPDATE tensors of the site after ``name`` (None: the first site) to the device."""
        names = list(self.sites)
        following = 0 if name is None else names.index(name) + 1
        for site in names[following : following + 1]:
            self.sites[site].fetch()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors on the device."""
        for loop in self.loops:
            yield from loop.tensors()
        for site in self.sites.values():
            yield from site.tensors()

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in host memory."""
        for site in self.sites.values():
            yield from site.host_tensors()


@dataclass
class BlockCall:
    """Records of the blocks of one call, which the loop does not read, except for the symbols of a run's report."""

    facts: Any = None  # facts about the call, for the transformer's driver
    dense: set[str] = field(default_factory=set)  # blocks that fell back to their own forward
    # how often each part of a block has run or was forecast, by the names of both
    turns: Counter[tuple[str, str]] = field(default_factory=Counter)
    # symbols that blocks computed in this call, by name
    symbols: dict[str, SparseSymbols] = field(default_factory=dict)
    # densities of these symbols, float32 on the device, by name
    densities: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Call:
    """One transformer call: its mode, and the state that its blocks read and write."""

    transformer: str
    mode: StepMode  # mode of the loop that computes most
    modes: tuple[StepMode, ...]  # mode of each loop of the branch
    tick: Tick
    course: Course  # coordinates, weights and moves of the run's steps
    branch: BranchState
    records: bool  # blocks record their features, because a later DISPATCH step may read them
    report: RunReport  # report of the run
    elapsed: Stopwatch  # stopwatch of the call
    # this computed call leaves attention tiles out, so sparse attention runs at its sites at any level
    skips: bool = False
    forecasts_output: bool = False  # the whole output is forecast, so no block runs
    place: int = 0  # place of the branch in the order of this step's calls
    # FLOPs of each block that ran: in total, and of its query-key pairs. The driver fills it.
    work: dict[str, tuple[float, float]] = field(default_factory=dict)
    # float32 tensors that the host reads at the end of the call in one copy, each group with what gets its numbers
    measured: list[tuple[Sequence[torch.Tensor], Callable[[list[float]], None]]] = field(default_factory=list)

    @cached_property
    def blocks(self) -> BlockCall:
        """Records of the blocks in this call."""
        return BlockCall()

    @cached_property
    def computing(self) -> list[int]:
        """Places in ``branch.loops`` of the loops that compute this step."""
        return [place for place, mode in enumerate(self.modes) if mode is not StepMode.DISPATCH]

    @cached_property
    def computed_rows(self) -> tuple[int, ...] | None:
        """Samples that compute, in the order of the batch, which guidance relies on; None = the whole batch."""
        if len(self.computing) == len(self.modes):
            return None
        return tuple(sorted(row for place in self.computing for row in self.branch.loops[place].rows or ()))

    @cached_property
    def computed_share(self) -> float:
        """Share of the samples that compute; 1 in a call that forecasts every sample."""
        rows = self.computed_rows
        return len(rows) / sum(len(loop.rows or ()) for loop in self.branch.loops) if rows else 1.0

    @property
    def coordinate(self) -> float:
        """Coordinate at which this step's forecasts are evaluated and its features recorded."""
        return self.course.coordinates[self.tick.step]

    @property
    def progress(self) -> float:
        return self.tick.step / self.tick.steps

    def site(self, name: str, kind: Callable[[], Kind]) -> Kind:
        """Return the records of a block in this branch; ``kind`` creates them at the first request."""
        return self.branch.sites.setdefault(name, kind())  # type: ignore[return-value]

    def measure(self, numbers: Sequence[torch.Tensor], take: Callable[[list[float]], None]) -> None:
        """Call ``take`` with these numbers once the host has read them."""
        self.measured.append((numbers, take))
