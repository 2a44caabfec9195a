"""Branches of guidance within a run: find the branch of a call, and drop records that no longer apply.

A branch has the name that the pipeline gives it, or its place in the order of calls in a step. Its records are dropped
if the call's tensors have other shapes, if its conditioning changed, or if it is called twice in a step, for example by
another pipeline that shares the transformer. A second transformer that takes over frees the branches of the first.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.branch import BranchState, Call, Description
from dit_accel.loop.closed_loop import ClosedLoop, Course, Gap
from dit_accel.loop.memory import plan_memory
from dit_accel.loop.outputs import FIRST, LoopPerOutput
from dit_accel.loop.report import RunReport
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset

MOST_BRANCHES = 8  # branches without a name in a step; diffusers' pipelines have up to 4
Key = tuple[str, str]  # name of the transformer, name of the branch


class Branches:
    """The branches of one run; ``loop`` and ``gap`` are the classes that forecast, and that decide.

    Attributes:
        course: coordinates, weights and moves of the run's steps; set when the run begins.
        awaited: functions, each of which observes the output of a call on another device.
        is_stuck: branches were called twice in more than one step, so steps can't be told apart.
        symbols: latest symbols of the first branch, by block.
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
        # By place of the samples in their branches; transformers that are called in the same steps share a gap.
        self._gaps: dict[int, Gap] = {}
        self.drop()

    def drop(self, why: str | None = None) -> None:
        """Drop all records of the branches; ``why`` goes to the report."""
        if why:
            self._note_dropped(why)
        self._states: dict[Key, BranchState] = {}
        self.awaited: list[Callable[[], None]] = []
        for gap in self._gaps.values():
            gap.restart()

    def allow(self, left: int) -> None:
        """Let so many more steps compute, with a rule that has a budget."""
        for gap in self._gaps.values():
            gap.left = min(left, gap.most - gap.spent)

    def settle(self) -> None:
        """Observe the outputs that come from another device, in the order of the calls."""
        while self.awaited:
            self.awaited.pop(0)()

    def begin_step(self) -> None:
        """Begin a step, in which each branch may be called once."""
        if self.awaited:
            self.settle()
        self._unnamed.clear()
        self._called.clear()

    def all(self) -> list[BranchState]:
        return list(self._states.values())

    def of(self, call: Description, items: Mapping[str, Any], *, plain: bool) -> tuple[BranchState, int]:
        """Return the branch of a call with the conditioning ``items``, and its place in the order of this step's calls.

        Raises:
            MemoryBudgetError: the branch does not fit into the preset's budget together with the others.
        """
        key = self._key(call.transformer, call.context)
        if (known := self._states.get(key)) is not None and known.shapes != call.shapes:
            self.settle()
            self.drop("shapes or return_dict changed")
        elif key in self._called and not plain:  # as in another pipeline's loop over the same transformer
            self.settle()
            self.is_stuck = self._has_repeated
            self.drop(None if self.is_stuck else "branch called twice")
            self._has_repeated = True
        elif known is None or plain:
            pass  # without records that could be wrong
        elif changed := known.conditioning.changed(items):
            self.settle()
            self._note_dropped(f"{', '.join(changed)} changed")
            renewed = self._new(key, call)  # the records of other branches stay valid
            renewed.conditioning = known.conditioning  # it knows which items held their value
            self._states[key] = renewed
        elif known.conditioning.new_modes:  # computes, because its output may change shape
            self.settle()
            self._restart(known)
        elif known.conditioning.moved or known.unsettled:
            for loop in known.loops:
                loop.computed_step = -1  # so this step computes: the record may be of another conditioning
        self._called[key] = None
        if key not in self._states:
            self._drop_resting()
            self._states[key] = self._new(key, call)
            self._states[key].conditioning.changed(items)
        return self._states[key], list(self._called).index(key)

    def close(self, call: Call) -> None:
        """Record that a call has computed."""
        if call.forecasts_output:
            return
        if call.branch is next(iter(self._states.values())):
            self.symbols |= call.blocks.symbols
        for place in call.computing:
            call.branch.loops[place].computed_step = call.tick.step
        call.branch.updated |= call.mode is StepMode.UPDATE or (call.records and self._preset.forecast.level == "layer")

    def unload_symbols(self) -> None:
        """Move the symbols to the host, because FG-Attn's take gigabytes for long videos."""
        self.symbols = {name: symbols.to("cpu") for name, symbols in self.symbols.items()}

    def _key(self, transformer: str, context: str | None) -> Key:
        """Return the key of a branch; calls without a name are numbered by their order in the step."""
        if context is None:
            count = min(self._unnamed.get(transformer, 0) + 1, MOST_BRANCHES)
            self._unnamed[transformer] = count
            context = f"call {count}"
        return transformer, context

    def _drop_resting(self) -> None:
        """Drop the branches of transformers that another transformer has replaced, to free their memory."""
        at_work = {name for name, _ in self._called}
        staying = {key: branch for key, branch in self._states.items() if key[0] in at_work}
        if len(staying) < len(self._states):
            self.unload_symbols()
            for gap in self._gaps.values():
                gap.restart()
            self._states = staying

    def _new(self, key: Key, call: Description) -> BranchState:
        """Return a new branch. The memory plan covers all branches, so the records of the others may be converted."""
        size, samples = call.size(), call.samples()
        others = [branch for name, branch in self._states.items() if name != key]
        memory = plan_memory(self._preset, [*(branch.size for branch in others), size])
        for branch in others:
            branch.adopt(memory)
        self._report.estimated_bytes = memory.device_bytes
        self._report.memory_measures = list(memory.measures)
        loops = []
        for place, rows in enumerate(samples):
            gap = self._gaps.setdefault(place, self._gap(self._preset, self.course))
            gap.note = self._report.note
            courses = {FIRST: self.course, **self.course.further}
            by_output = {name: self._loop(gap, memory.order, rows, course) for name, course in courses.items()}
            loops.append(LoopPerOutput(by_output) if self.course.further else by_output[FIRST])
        return BranchState(key[1], call.shapes, size, memory, loops)

    def _restart(self, branch: BranchState) -> None:
        """Drop the records of a branch; the report notes it if the step would have been forecast."""
        step = self._report.steps[-1].index
        planned = [loop.mode(step, branch.updated) for loop in branch.loops]
        for loop in branch.loops:
            loop.restart()
        branch.sites.clear()
        branch.updated = False
        if planned != [loop.mode(step, branch.updated) for loop in branch.loops]:
            changed = ", ".join(branch.conditioning.new_modes)
            self._report.note(f"steps computed when {changed} changed: the output may then have another shape")

    def _note_dropped(self, why: str) -> None:
        self._report.note(f"{why} at step {self._report.steps[-1].index}: caches dropped")
