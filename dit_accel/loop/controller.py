"""Opens and closes every transformer call, keeps the branches of one run, and its report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop import timing
from dit_accel.loop.accounts import MODES_BY_WORK, Accounts
from dit_accel.loop.branch import BranchState, Call
from dit_accel.loop.call_parts import CallParts
from dit_accel.loop.closed_loop import ClosedLoop, Course, Gap, Output
from dit_accel.loop.growth import bends, error_weights, responses
from dit_accel.loop.interval import IntervalGap, IntervalLoop
from dit_accel.loop.memory import ModelSize, plan_memory
from dit_accel.loop.report import RunReport
from dit_accel.loop.rows import Rows, join_rows, take_rows
from dit_accel.loop.tracker import Clock, StepMode, Tick
from dit_accel.presets import Preset

WHOLE_BATCH: tuple[Rows, ...] = (None,)  # all its samples decided together
MOST_BRANCHES = 8  # that are told apart by the order of calls in a step; pipelines of diffusers have up to 4
logger = logging.getLogger(__name__)
STUCK = (
    "rest of the run computed: its steps can't be told apart, for the pipeline's scheduler took none between calls of "
    "one branch"
)


class Controller:
    """One denoising run: the pipeline's transformers, their branches, and the report of the last run.

    Args:
        preset: what to compute when.
        clock: tells the step.
        family: model family, for the report.
        loop, gap: classes that decide and forecast; None = those of ``schedule.control``. A variant of the closed loop
            is a subclass that is passed here.
    """

    def __init__(
        self,
        preset: Preset,
        clock: Clock,
        family: str,
        loop: type[ClosedLoop] | None = None,
        gap: type[Gap] | None = None,
    ) -> None:
        adaptive = preset.schedule.control == "adaptive"
        self.preset = preset
        self.family = family
        self.call: Call | None = None
        self.parts = CallParts()
        self._clock = clock
        self._loop = loop or (ClosedLoop if adaptive else IntervalLoop)
        self._gap = gap or (Gap if adaptive else IntervalGap)
        self._forecasts = preset.schedule.interval != 1
        self._layers: dict[str, list[str]] = {}
        self._standing: list[str] = []  # remarks on every run
        self.reset()

    def add_transformer(self, name: str, layers: list[str]) -> None:
        """Registers a transformer with the names of its blocks, for the report."""
        self._layers[name] = layers
        self.reset()

    @property
    def missed_run(self) -> bool:
        """Whether a run has begun of which no step was read."""
        return self._clock.missed_run

    def reset(self) -> None:
        """Forgets all caches and the last run; the next call starts a new one."""
        self._tick: Tick | None = None
        self._anonymous_calls: dict[str, int] = {}
        self._called: dict[tuple[str, str], None] = {}  # in the order of the step's first calls
        self._why_plain: str | None = None  # why nothing may be forecast
        self._called_twice = False  # some branch, in some step of the run
        self._forget()
        self.last_symbols: dict[str, SparseSymbols] = {}
        self.last_layout: TokenLayout | None = None
        layers = [layer for names in self._layers.values() for layer in names]
        density: list[list[float | None]] = [[] for _ in layers]
        self.report = RunReport(self.preset.name, self.family, layers, density=density, notes=list(self._standing))
        self._accounts = Accounts(self.report, self.preset.memory.budget_gib)

    def read_report(self) -> RunReport:
        """The report with all times read, which waits for the GPU."""
        self._accounts.read_times()
        seconds = self.parts.seconds()
        if self.report.steps and any(name in seconds for name in self._layers):  # else they are of a later call
            self.report.parts = seconds
        return self.report

    def release(self) -> None:
        """Frees the caches of a finished run; its report stays, and its symbols, on the host."""
        self.parts.end()
        self._forget()
        self._unload_symbols()

    def _unload_symbols(self) -> None:
        """Those of FG-Attn take gigabytes where videos are long."""
        self.last_symbols = {name: symbols.to("cpu") for name, symbols in self.last_symbols.items()}

    @contextmanager
    def calling(
        self,
        transformer: str,
        context: str | None,
        timestep: torch.Tensor | float,
        shapes: tuple,
        size: Callable[[], ModelSize] = ModelSize,
        samples: Callable[[], Sequence[Rows]] = lambda: WHOLE_BATCH,
        conditions: Callable[[], Mapping[str, Any]] = dict,
    ) -> Iterator[Call]:
        """Opens a transformer call and closes it, also when it raises; then the run's caches are dropped.

        Args:
            transformer: its name in the pipeline.
            context: branch as the pipeline names it, or None: then calls in one step are told apart by order.
            timestep: what the pipeline passes to the transformer.
            shapes: of the call's tensors, and what tells the form of its output; a change within a run ends that run.
            size: what they make the transformer remember; asked for at a branch's first call.
            samples: rows whose steps are decided apart; asked for likewise.
            conditions: what the call is conditioned on besides latents and time; a change within a run ends that run.

        Raises:
            MemoryBudgetError: the branch does not fit into the preset's budget together with the run's others.
        """
        elapsed = timing.stopwatch_of(timestep)
        self.parts.enter(transformer, elapsed)
        try:
            self.call = self._open(transformer, context, timestep, shapes, size, samples, conditions)
            yield self.call
        except BaseException:
            self._forget()
            raise
        else:
            self._close(self.call)
            self._accounts.take_time(elapsed())
        finally:
            self.call = None
            self.parts.leave()

    def stand_aside(self, timestep: torch.Tensor | float | None, reason: str) -> None:
        """Notes a call that runs without the loop, which may be one of no run at all, and drops the run's caches."""
        with suppress(UnsupportedError):  # a training loop draws timesteps of its own
            if timestep is not None:
                self._follow(timestep)
                self._accounts.step.mode = StepMode.FULL.value
        self._forget()
        self.report.warn(reason)

    def forecast_output(self, call: Call) -> Output:
        """The transformer's output, forecast for every sample."""
        loops = call.branch.loops
        return _joined(loops, [loop.forecast(call.tick.step) for loop in loops])

    def observe(self, call: Call, output: Output, used: Callable[[torch.Tensor, Rows], torch.Tensor]) -> Output:
        """Hands the transformer's output to the loops that compute.

        Args:
            output: the tensors of the output, batch first: of ``call.computed_rows``.
            used: selects the tokens of an output tensor that the pipeline uses; the tensor holds these samples.

        Returns:
            What the pipeline is to go on with, for the whole batch: the output, corrected for what forecasts before it
            missed if the preset says so, and forecasts for samples that don't compute.
        """
        if self._why_plain is not None:
            return output
        step, rows = call.tick.step, call.computed_rows
        parts: list[Output] = []
        for place, loop in enumerate(call.branch.loops):
            if place not in call.computing:
                parts.append(loop.forecast(step))
                continue
            own = loop.rows if rows is None or loop.rows is None else [rows.index(row) for row in loop.rows]
            part = output if own is None else tuple(take_rows(tensor, own) for tensor in output)
            parts.append(loop.observe(step, part, _of_rows(used, loop.rows)))
            call.measure(loop.measured, partial(self._decide, step, loop, place))
        return _joined(call.branch.loops, parts)

    def _decide(self, step: int, loop: ClosedLoop, place: int, measured: list[float]) -> None:
        error = loop.decide(step, measured)
        if error is not None:
            logger.debug("step %d: the forecast would have missed %.4g", step, error)
            self._accounts.take_error(error, place)

    def read(self, call: Call, agreed: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers) -> None:
        """Moves what a call has measured to the host, all of it at once, and has everybody decide by it.

        This is the one host synchronisation of a computed step.

        Args:
            agreed: makes one of what several devices have measured.
        """
        numbers = [each.view(-1) for measured, _ in call.measured for each in measured]
        values = iter(agreed(torch.cat(numbers)).tolist() if numbers else ())
        for measured, take in call.measured:
            take(list(islice(values, sum(each.numel() for each in measured))))

    def settle(self) -> None:
        """Has calls observed whose outputs come from another device, in the order of the calls."""
        while self.awaited:
            self.awaited.pop(0)()

    def warn_of_all_runs(self, remark: str) -> None:
        """A warning, and a remark on this run and all that follow."""
        self._standing.append(remark)
        self.report.warn(remark)

    def _forget(self, why: str | None = None) -> None:
        """Drops the run's caches; ``why`` goes to the report, once however often it happens in a step."""
        if why:
            self._note_dropped(why)
        self._branches: dict[tuple[str, str], BranchState] = {}
        self.awaited: list[Callable[[], None]] = []  # each observes the output of a call that another device makes
        # By place of the samples in their branches; transformers that work in the same steps decide together.
        self._gaps: dict[int, Gap] = {}

    def _note_dropped(self, why: str) -> None:
        self.report.note(f"{why} at step {self._accounts.step.index}: caches dropped")

    def _open(
        self,
        transformer: str,
        context: str | None,
        timestep: torch.Tensor | float,
        shapes: tuple,
        size: Callable[[], ModelSize],
        samples: Callable[[], Sequence[Rows]],
        conditions: Callable[[], Mapping[str, Any]],
    ) -> Call:
        tick, schedule = self._follow(timestep), self.preset.schedule
        key = self._key(transformer, context)
        branch = self._branch(key, shapes, size, samples, conditions)
        modes = tuple(
            StepMode.FULL if self._why_plain is not None else loop.mode(tick.step, branch.updated)
            for loop in branch.loops
        )
        mode = max(modes, key=MODES_BY_WORK.index)
        records = mode is StepMode.UPDATE or (
            mode is StepMode.FULL and tick.step < schedule.warmup and self._forecasts and self._why_plain is None
        )
        computes = mode is not StepMode.DISPATCH and self._why_plain is None
        skips = computes and self.preset.skip.steps == "all" and tick.step >= schedule.warmup
        if mode is StepMode.UPDATE:
            branch.fetch_after(None)
        place = list(self._called).index(key)
        logger.debug("step %d: %s, %s, %s", tick.step, mode.value, *key)
        return Call(transformer, mode, modes, tick, self._course, branch, records, self.report, skips, place)

    def _follow(self, timestep: torch.Tensor | float) -> Tick:
        """Where the loop stands; a new run or step begins in the report."""
        tick, forecast = self._clock.read(timestep), self.preset.forecast
        if self._tick is None or tick.run is not self._tick.run:
            self.reset()
            sigmas, coordinates = tick.sigmas, tick.coordinates(forecast.coordinate)
            self._course = Course(coordinates, error_weights(sigmas), tick.moves, responses(sigmas), bends(sigmas))
            self._why_plain = tick.plain if self._forecasts else None
            logger.info("run of %d steps begins: %s on %s", tick.steps, self.preset.name, self.family)
            if self._why_plain is not None:
                self.report.warn(f"every step computed: {self._why_plain}")
            elif forecast.corrector and tick.moves is None:
                self.report.note("nothing corrected: the scheduler is not known to add up a flow's outputs")
        if self._tick is None or tick.step != self._tick.step:
            self.settle()
            self._anonymous_calls.clear()
            self._called.clear()
            self._accounts.start_step(tick)
        self._tick = tick
        return tick

    def _key(self, transformer: str, context: str | None) -> tuple[str, str]:
        """Names a branch; calls of no name are told apart by their order in the step."""
        if context is None:
            count = min(self._anonymous_calls.get(transformer, 0) + 1, MOST_BRANCHES)
            self._anonymous_calls[transformer] = count
            context = f"call {count}"
        return transformer, context

    def _branch(
        self,
        key: tuple[str, str],
        shapes: tuple,
        size: Callable[[], ModelSize],
        samples: Callable[[], Sequence[Rows]],
        conditions: Callable[[], Mapping[str, Any]],
    ) -> BranchState:
        known = self._branches.get(key)
        items = conditions() if self._forecasts and self._why_plain is None else {}
        if known is not None and known.shapes != shapes:
            self.settle()
            self._forget("shapes or return_dict changed")
        elif key in self._called and self._why_plain is None:  # as in another pipeline's loop over the same transformer
            self.settle()
            if self._called_twice:
                self._why_plain = STUCK
                self.report.warn(STUCK)
                self._forget()
            else:
                self._forget("branch called twice")
            self._called_twice = True
        elif known is not None and (changed := known.conditioning.changed(items)):
            self.settle()
            self._note_dropped(f"{', '.join(changed)} changed")
            branch = self._new_branch(key, shapes, size(), samples())
            branch.conditioning = known.conditioning  # which knows what held its value
            self._branches[key] = branch  # what other branches remember holds
        self._called[key] = None
        if key not in self._branches:
            # Where a second transformer has taken over, what the first remembers would only take up memory.
            at_work = {name for name, _ in self._called}
            at_rest = [known for known in self._branches if known[0] not in at_work]
            if at_rest:
                self._unload_symbols()
                self._gaps.clear()
            self._branches = {known: branch for known, branch in self._branches.items() if known not in at_rest}
            self._branches[key] = self._new_branch(key, shapes, size(), samples())
            self._branches[key].conditioning.changed(items)
        return self._branches[key]

    def _new_branch(self, key: tuple[str, str], shapes: tuple, size: ModelSize, samples: Sequence[Rows]) -> BranchState:
        """A branch under a memory plan for it and the others, which may change how these keep what they have."""
        others = [branch for name, branch in self._branches.items() if name != key]
        memory = plan_memory(self.preset, [*(branch.size for branch in others), size])
        for branch in others:
            branch.adopt(memory)
        self.report.estimated_bytes = memory.device_bytes
        self.report.memory_measures = list(memory.measures)
        loops = []
        for place, rows in enumerate(samples):
            gap = self._gaps.setdefault(place, self._gap(self.preset, self._course))
            loops.append(self._loop(gap, memory.order, rows))
        return BranchState(key[1], shapes, size, memory, loops)

    def _close(self, call: Call) -> None:
        if call.branch is next(iter(self._branches.values())):
            self.last_symbols |= call.symbols
        for place in call.computing:
            call.branch.loops[place].computed_step = call.tick.step
        call.branch.updated |= call.mode is StepMode.UPDATE or (call.records and self.preset.forecast.level == "layer")
        self._accounts.take_call(call, self._branches.values())


def _of_rows(used: Callable[[torch.Tensor, Rows], torch.Tensor], rows: Rows) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: used(tensor, rows)


def _joined(loops: Sequence[ClosedLoop], parts: Sequence[Output]) -> Output:
    """The output of the whole batch from those of its samples."""
    if len(loops) == 1:
        return parts[0]
    rows = [loop.rows or () for loop in loops]
    return tuple(join_rows(tensors, rows) for tensors in zip(*parts, strict=True))
