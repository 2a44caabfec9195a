"""Branches of guidance within a run: which one a call belongs to, and when what it remembers is dropped.

A branch is told by the name that the pipeline gives it, or by the order of calls in a step. Its records are dropped
where the call's tensors have other shapes, where its conditioning changed, and where it is called twice in a step, as
by another pipeline that shares the transformer. Where a second transformer takes over, the branches of the first are
dropped, since they would only take up memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.branch import BranchState, Call
from dit_accel.loop.closed_loop import ClosedLoop, Course, Gap
from dit_accel.loop.memory import ModelSize, plan_memory
from dit_accel.loop.report import RunReport
from dit_accel.loop.rows import Rows
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset

MOST_BRANCHES = 8  # that are told apart by the order of calls in a step; pipelines of diffusers have up to 4
Key = tuple[str, str]  # names of the transformer and of the branch


@dataclass(frozen=True)
class Request:
    """A transformer call as its driver describes it.

    Args:
        transformer: its name in the pipeline.
        context: branch as the pipeline names it, or None: then calls in one step are told apart by order.
        shapes: of the call's tensors, and what tells the form of its output; a change within a run ends that run.
        size: what they make the transformer remember; asked for at a branch's first call.
        samples: rows whose steps are decided apart; asked for likewise.
        conditions: what the call is conditioned on besides latents and time; a change within a run ends that run.
    """

    transformer: str
    context: str | None
    shapes: tuple
    size: Callable[[], ModelSize]
    samples: Callable[[], Sequence[Rows]]
    conditions: Callable[[], Mapping[str, Any]]


class Branches:
    """The branches of one run.

    Args:
        preset: what to compute when.
        loop, gap: classes that decide and forecast.
        report: of the run.

    Attributes:
        course: the run's steps as the loop sees them; set when the run begins.
        awaited: each observes the output of a call that another device makes.
        is_stuck: branches were called twice in more than one step, so steps can't be told apart.
        symbols: latest ones of the first branch, by block.
    """

    def __init__(self, preset: Preset, loop: type[ClosedLoop], gap: type[Gap], report: RunReport) -> None:
        self._preset = preset
        self._loop = loop
        self._gap = gap
        self._report = report
        self.course: Course
        self._unnamed: dict[str, int] = {}  # calls without a name in this step, by transformer
        self._called: dict[Key, None] = {}  # in the order of the step's first calls
        self._has_repeated = False
        self.is_stuck = False
        self.symbols: dict[str, SparseSymbols] = {}
        self.drop()

    def drop(self, why: str | None = None) -> None:
        """Drops everything that the branches remember; ``why`` goes to the report."""
        if why:
            self._note_dropped(why)
        self._states: dict[Key, BranchState] = {}
        self.awaited: list[Callable[[], None]] = []
        # By place of the samples in their branches; transformers that work in the same steps decide together.
        self._gaps: dict[int, Gap] = {}

    def settle(self) -> None:
        """Has calls observed whose outputs come from another device, in the order of the calls."""
        while self.awaited:
            self.awaited.pop(0)()

    def begin_step(self) -> None:
        """A step begins, in which each branch may be called once."""
        self.settle()
        self._unnamed.clear()
        self._called.clear()

    def all(self) -> list[BranchState]:
        """Branches that remember something."""
        return list(self._states.values())

    def of(self, request: Request, items: Mapping[str, Any], *, plain: bool) -> tuple[BranchState, int]:
        """The branch of a call, and its place among those that were called in this step.

        Args:
            items: what the call is conditioned on.
            plain: whether nothing of the run is forecast.

        Raises:
            MemoryBudgetError: the branch does not fit into the preset's budget together with the others.
        """
        key = self._key(request.transformer, request.context)
        known = self._states.get(key)
        if known is not None and known.shapes != request.shapes:
            self.settle()
            self.drop("shapes or return_dict changed")
        elif key in self._called and not plain:  # as in another pipeline's loop over the same transformer
            self.settle()
            self.is_stuck = self._has_repeated
            self.drop(None if self.is_stuck else "branch called twice")
            self._has_repeated = True
        elif known is not None and (changed := known.conditioning.changed(items)):
            self.settle()
            self._note_dropped(f"{', '.join(changed)} changed")
            renewed = self._new(key, request)  # what other branches remember holds
            renewed.conditioning = known.conditioning  # which knows what held its value
            self._states[key] = renewed
        self._called[key] = None
        if key not in self._states:
            self._drop_resting()
            self._states[key] = self._new(key, request)
            self._states[key].conditioning.changed(items)
        return self._states[key], list(self._called).index(key)

    def close(self, call: Call) -> None:
        """Takes note of what a call has computed."""
        if call.branch is next(iter(self._states.values())):
            self.symbols |= call.symbols
        for place in call.computing:
            call.branch.loops[place].computed_step = call.tick.step
        call.branch.updated |= call.mode is StepMode.UPDATE or (call.records and self._preset.forecast.level == "layer")

    def unload_symbols(self) -> None:
        """Moves the symbols to the host, for those of FG-Attn take gigabytes where videos are long."""
        self.symbols = {name: symbols.to("cpu") for name, symbols in self.symbols.items()}

    def _key(self, transformer: str, context: str | None) -> Key:
        """Names a branch; calls without a name are told apart by their order in the step."""
        if context is None:
            count = min(self._unnamed.get(transformer, 0) + 1, MOST_BRANCHES)
            self._unnamed[transformer] = count
            context = f"call {count}"
        return transformer, context

    def _drop_resting(self) -> None:
        """Drops branches of transformers that another one has taken over from: they would only take up memory."""
        at_work = {name for name, _ in self._called}
        staying = {key: branch for key, branch in self._states.items() if key[0] in at_work}
        if len(staying) < len(self._states):
            self.unload_symbols()
            self._gaps.clear()
            self._states = staying

    def _new(self, key: Key, request: Request) -> BranchState:
        """A branch under a memory plan for it and the others, which may change how these keep what they have."""
        size, samples = request.size(), request.samples()
        others = [branch for name, branch in self._states.items() if name != key]
        memory = plan_memory(self._preset, [*(branch.size for branch in others), size])
        for branch in others:
            branch.adopt(memory)
        self._report.estimated_bytes = memory.device_bytes
        self._report.memory_measures = list(memory.measures)
        loops = []
        for place, rows in enumerate(samples):
            gap = self._gaps.setdefault(place, self._gap(self._preset, self.course))
            loops.append(self._loop(gap, memory.order, rows))
        return BranchState(key[1], request.shapes, size, memory, loops)

    def _note_dropped(self, why: str) -> None:
        self._report.note(f"{why} at step {self._report.steps[-1].index}: caches dropped")
