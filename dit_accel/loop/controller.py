"""Open and close every transformer call, and keep the branches and the report of one run."""

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
from dit_accel.loop.accounts import MODES_BY_WORK, Accounts
from dit_accel.loop.branch import Call, Description
from dit_accel.loop.branches import Branches
from dit_accel.loop.budget import BudgetGap, Deadline
from dit_accel.loop.closed_loop import ClosedLoop, Course, Gap, Output
from dit_accel.loop.growth import bends, error_weights, log_odds, responses
from dit_accel.loop.interval import IntervalGap, IntervalLoop
from dit_accel.loop.outputs import LoopPerOutput
from dit_accel.loop.report import RunReport
from dit_accel.loop.rows import join_rows, take_rows
from dit_accel.loop.timing import CallParts, Stopwatch, stopwatch_of
from dit_accel.loop.tracker import Clock, Place, StepMode, Tick
from dit_accel.loop.trajectory import Trajectory
from dit_accel.presets import Preset

logger = logging.getLogger(__name__)
STUCK = (
    "rest of the run computed: its steps can't be told apart, because two calls of one branch had the same step, by "
    "the scheduler's step_index or the timestep"
)
CALIBRATED = (
    "target_psnr {0.target_psnr:g} dB: target_error {0.bound:g}, with which 90% of the prompts of the preset's "
    "calibration reached it"
)

RULES: dict[str, tuple[type[ClosedLoop], type[Gap]]] = {  # by ``schedule.rule``: what forecasts, and what decides
    "adaptive": (ClosedLoop, Gap),
    "budget": (ClosedLoop, BudgetGap),
    "interval": (IntervalLoop, IntervalGap),
}


class Controller:
    """One denoising run: the pipeline's transformers, their branches, and the report of the last run."""

    def __init__(self, preset: Preset, clock: Clock, family: str) -> None:
        self.preset = preset
        self.family = family
        self.parts = CallParts()
        self._clock = clock
        self._forecasts = preset.schedule.interval != 1
        self._layers: dict[str, list[str]] = {}
        schedule = preset.schedule
        self.parts.keeps_previous = schedule.max_seconds is not None
        self.deadline: Deadline | None = None  # of the next run, instead of one by ``max_seconds``
        self._whole: Deadline | None = None  # of the call
        self._deadline: Deadline | None = None  # of the run
        self._earlier: list[str] = []  # modes of the steps of the call's earlier runs
        self._standing = [] if schedule.target_psnr is None else [CALIBRATED.format(schedule)]  # notes on every run
        self.reset()

    def add_transformer(self, name: str, layers: list[str]) -> None:
        """Register a transformer with the names of its blocks, for the report."""
        self._layers[name] = layers
        self.reset()

    @property
    def missed_run(self) -> bool:
        """Return True if a run has begun and none of its steps was read."""
        return self._clock.missed_run

    def reset(self) -> None:
        """Drop all caches and the report; the next call starts a new run."""
        self.parts.remarks.clear()
        self._tick: Tick | None = None
        self._why_plain: str | None = None  # why no step may be forecast
        self.last_layout: TokenLayout | None = None
        layers = [layer for names in self._layers.values() for layer in names]
        density: list[list[float | None]] = [[] for _ in layers]
        self.report = RunReport(self.preset.name, self.family, layers, density=density, notes=list(self._standing))
        self._accounts = Accounts(self.report, self.preset.memory.budget_gib)
        self.branches = Branches(self.preset, *RULES[self.preset.schedule.rule], self.report)
        self._trajectory = Trajectory()
        self._unread: list[Call] = []  # whose measurements the next call reads

    @property
    def last_symbols(self) -> dict[str, SparseSymbols]:
        """Latest symbols of the run's first branch, by block; on the host once the run is over."""
        return self.branches.symbols

    def read_report(self) -> RunReport:
        """Return the report with all times read, which waits for the GPU."""
        self.settle()
        self._accounts.read_times()
        seconds = self.parts.seconds()
        if self.report.steps and any(name in seconds for name in self._layers):  # otherwise they belong to a later call
            self.report.parts = seconds
        return self.report

    def release(self) -> None:
        """Free the caches of a finished run; its report stays, and its symbols move to the host."""
        self.settle()
        self.parts.end()
        self._trajectory = Trajectory()
        self.branches.drop()
        self.branches.unload_symbols()

    @property
    def may_forecast(self) -> bool:
        return self._forecasts and self._why_plain is None

    def compute_all(self, remark: str) -> None:
        """Forecast no further step of the run, and warn why."""
        self._why_plain = remark
        self.report.warn(remark)

    @contextmanager
    def calling(self, described: Description) -> Iterator[Call]:
        """Run :meth:`begin` and :meth:`end` of a transformer call; if it raises, drop the run's caches."""
        call = self.begin(described)
        try:
            yield call
        except BaseException:
            self.abort()
            raise
        self.end(call)

    def begin(self, described: Description) -> Call:
        """Begin a transformer call: find its step and its branch, and decide its mode.

        Raises:
            MemoryBudgetError: the run's branches together exceed the preset's budget.
        """
        elapsed = stopwatch_of(described.timestep)
        self.parts.enter(described.transformer, elapsed)
        try:
            items = described.conditions() if self._forecasts else {}  # before what waits for the device
            self.settle()
            tick = self._follow(described.timestep, described.place)
            if self.may_forecast:
                changes = self.branches.course.responses
                if self._trajectory.is_replaced(tick.step, described.latents, changes[tick.step] if changes else 1.0):
                    self.branches.drop("latents changed")
            return self._decide_mode(described, items if self.may_forecast else {}, tick, elapsed)
        except BaseException:
            self.abort()
            raise

    def end(self, call: Call) -> None:
        """End a transformer call: keep its records, and add its costs to the report."""
        try:
            self.branches.close(call)
            self._accounts.take_call(call, self.branches.all())
            self._accounts.take_time(call.elapsed())
        finally:
            self.parts.leave()

    def abort(self) -> None:
        """End a transformer call that has raised, and drop the run's caches."""
        self._unread.clear()
        self.branches.drop()
        self.parts.leave()

    def stand_aside(self, timestep: torch.Tensor | float | None, reason: str) -> None:
        """Note a call that runs without the loop, even outside of a run, and drop the run's caches."""
        self.settle()
        with suppress(UnsupportedError):  # a training loop has timesteps of its own
            if timestep is not None:
                self._follow(timestep)
                self._accounts.step.mode = StepMode.FULL.value
        self._accounts.begin()
        self.branches.drop()
        self.report.warn(reason)

    def forecast_output(self, call: Call) -> Output:
        """Return the transformer's output, forecast for every sample."""
        loops = call.branch.loops
        if len(loops) == 1:
            return self.leave(loops[0].forecast(call.tick.step))
        return self.leave(_joined(loops, [loop.forecast(call.tick.step) for loop in loops]))

    def observe(self, call: Call, output: Output, used: Callable[..., torch.Tensor]) -> Output:
        """Pass the transformer's output to the loops that compute.

        Args:
            output: the tensors of the output, batch first, for the samples ``call.computed_rows``.
            used: selects the tokens of an output tensor that the pipeline uses; it gets the tensor and its `rows`.

        Returns:
            The output of the whole batch, with which the pipeline continues: forecasts for samples that don't compute,
            and for the others the output, corrected for earlier forecast errors if the preset asks for it.
        """
        if self._why_plain is not None:
            return output
        step, rows = call.tick.step, call.computed_rows
        parts: list[Output] = []
        for place, loop in enumerate(call.branch.loops):
            if place not in call.computing:
                parts.append(loop.forecast(step))
                continue
            positions = loop.rows if rows is None or loop.rows is None else [rows.index(row) for row in loop.rows]
            part = output if positions is None else tuple(take_rows(tensor, positions) for tensor in output)
            parts.append(loop.observe(step, part, partial(used, rows=loop.rows)))
            call.measure(loop.measured, partial(self._decide, step, loop, place))
        return self.leave(_joined(call.branch.loops, parts))

    def leave(self, output: Output) -> Output:
        """Record the output with which the pipeline continues, and return it."""
        self._trajectory.leave(output)
        return output

    def _decide(self, step: int, loop: ClosedLoop | LoopPerOutput, place: int, measured: list[float]) -> None:
        if (error := loop.decide(step, measured)) is not None:
            logger.debug("step %d: forecast error %.4g", step, error)
            self._accounts.take_error(error, place, loop.decider)

    def read(self, call: Call, agreed: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers) -> None:
        """Copy all measurements of a call to the host at once, and call the functions that decide by them.

        This is the one host synchronisation of a computed step. ``agreed`` combines the numbers of several devices.
        """
        numbers = [number.view(-1) for measured, _ in call.measured for number in measured]
        values = iter(agreed(torch.cat(numbers)).tolist() if numbers else ())
        if self._deadline is not None and numbers:
            self.branches.allow(self._deadline.left(call.tick.steps - call.tick.step - 1))
        for measured, take in call.measured:
            take(list(islice(values, sum(number.numel() for number in measured))))

    def read_later(self, call: Call) -> None:
        """Read the measurements of a call when the next one begins; at once if its time counts for a deadline."""
        self._unread.append(call)
        if self._deadline is not None:
            self.settle()

    def settle(self) -> None:
        """Read the measurements that the latest call has left unread."""
        while self._unread:
            self.read(self._unread.pop())

    def warn_of_all_runs(self, remark: str) -> None:
        """Warn, and note the remark in the reports of this run and all later runs."""
        self._standing.append(remark)
        self.report.warn(remark)

    def _decide_mode(self, described: Description, items: Mapping[str, Any], tick: Tick, elapsed: Stopwatch) -> Call:
        """Find the branch of a call with these conditions, and decide how its step runs."""
        schedule = self.preset.schedule
        branch, place = self.branches.of(described, items, plain=self._why_plain is not None)
        if self.branches.is_stuck and self._why_plain is None:
            self.compute_all(STUCK)
        if self._why_plain is None:
            modes = tuple([loop.mode(tick.step, branch.updated) for loop in branch.loops])
        else:
            modes = (StepMode.FULL,) * len(branch.loops)
        mode = max(modes, key=MODES_BY_WORK.index)
        records = mode is StepMode.UPDATE or (
            mode is StepMode.FULL and tick.step < schedule.warmup and self._forecasts and self._why_plain is None
        )
        computes = mode is not StepMode.DISPATCH and self._why_plain is None
        skips = computes and self.preset.skip.steps == "all" and tick.step >= schedule.warmup
        if mode is StepMode.UPDATE:
            branch.fetch_after(None)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("step %d: %s, %s, %s", tick.step, mode.value, described.transformer, branch.name)
        return Call(
            transformer=described.transformer,
            mode=mode,
            modes=modes,
            tick=tick,
            course=self.branches.course,
            branch=branch,
            records=records,
            report=self.report,
            elapsed=elapsed,
            skips=skips,
            forecasts_output=mode is StepMode.DISPATCH and self.preset.forecast.level == "output",
            place=place,
        )

    def _begin_run(self) -> None:
        """Begin a run, with its own report; a call may have one for each chunk, segment or stage of a video."""
        parts, latest = self.parts, self._tick
        if parts.started is None or not parts.runs or latest is None:
            parts.runs, self._earlier, self._whole = 1, [], None
        elif latest.is_last:
            parts.runs, self._earlier = parts.runs + 1, self._earlier + [step.mode for step in self.report.steps]
        self.reset()
        if parts.runs > 1:
            count, forecast = len(self._earlier), self._earlier.count("dispatch")
            self.report.earlier = f"{parts.runs - 1} of this call, which forecast {forecast} of {count} steps"
        if (limit := self.preset.schedule.max_seconds) is not None:
            if self._whole is None:
                self._whole = self.deadline or Deadline(limit, *parts.bounds(list(self._layers)))
                self.deadline = None
            self._deadline = self._whole.of_run(parts.runs, parts.previous_runs)

    def _follow(self, timestep: torch.Tensor | float, place: Place | None = None) -> Tick:
        """Read the position in the run; start a new run or step in the report."""
        tick, forecast = self._clock.read(timestep, place), self.preset.forecast
        if self._tick is None or tick.run is not self._tick.run:
            self._begin_run()
            self.branches.course = _course_of(tick, forecast.coordinate)
            logger.info("run of %d steps begins: %s on %s", tick.steps, self.preset.name, self.family)
            if self._forecasts and tick.plain is not None:
                self.compute_all(f"every step computed: {tick.plain}")
            elif self._forecasts and tick.noisy is not None:
                self.report.note(tick.noisy)
            if self._why_plain is None and forecast.corrector and tick.moves is None:
                self.report.note("nothing corrected: the scheduler is not known to add up a flow's outputs")
        if self._tick is None or tick.step != self._tick.step:
            self.branches.begin_step()
            if self._deadline is not None:
                self._deadline.begin_step()
            self._accounts.start_step(tick)
        self._tick = tick
        return tick


def _course_of(tick: Tick, coordinate: str) -> Course:
    """Return the course of a run, and of its further outputs."""
    further = {name: _course_of(other, coordinate) for name, other in tick.further.items()}
    coordinates, sigmas, moves = tick.coordinates(coordinate), tick.sigmas, tick.moves
    changes = responses(sigmas, moves)
    return Course(coordinates, error_weights(sigmas), moves, changes, bends(sigmas), log_odds(sigmas), further)


def _joined(loops: Sequence[ClosedLoop | LoopPerOutput], parts: Sequence[Output]) -> Output:
    """Return the output of the whole batch from the outputs of its samples."""
    if len(loops) == 1:
        return parts[0]
    rows = [loop.rows or () for loop in loops]
    return tuple(join_rows(tensors, rows) for tensors in zip(*parts, strict=True))
