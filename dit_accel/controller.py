"""Decides the mode of every transformer call, and keeps the state of one run and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from dit_accel import timing
from dit_accel.forecast import History, forecast_weights
from dit_accel.kernels import weighted_sum
from dit_accel.layout import TokenLayout
from dit_accel.memory import GIB, ModelSize, plan_memory
from dit_accel.presets import Preset
from dit_accel.report import RunReport, StepRecord
from dit_accel.schedule import ErrorControl, FixedControl, SchedulerClock, StepMode, Tick, TimestepClock, make_control
from dit_accel.state import BranchState, Call
from dit_accel.symbols import SparseSymbols

_MODES_BY_WORK = [StepMode.DISPATCH, StepMode.UPDATE, StepMode.FULL]


class Controller:
    """One denoising loop: the pipeline's transformers, their branches, and the report of the last run.

    Args:
        preset: what to compute when.
        clock: tells the step.
        family: model family, for the report.
    """

    def __init__(self, preset: Preset, clock: SchedulerClock | TimestepClock, family: str) -> None:
        self.preset = preset
        self.family = family
        self.call: Call | None = None
        self._clock = clock
        self._layers: dict[str, list[str]] = {}
        self.reset()

    def add_transformer(self, name: str, layers: list[str]) -> None:
        """Registers a transformer with the names of its blocks, for the report."""
        self._layers[name] = layers
        self.reset()

    def reset(self) -> None:
        """Forgets all caches and the last run; the next call starts a new one."""
        self._tick: Tick | None = None
        self._timings: list[tuple[StepRecord, Callable[[], float]]] = []
        self._anonymous_calls: dict[str, int] = {}
        self._called: set[tuple[str, str]] = set()
        self._forget()
        self.last_symbols: dict[str, SparseSymbols] = {}
        self.last_layout: TokenLayout | None = None
        self._computed = self._plain = 0.0
        layers = [layer for names in self._layers.values() for layer in names]
        self.report = RunReport(self.preset.name, self.family, layers, density=[[] for _ in layers])

    def read_report(self) -> RunReport:
        """The report with all times read, which waits for the GPU."""
        for record, read in self._timings:
            record.seconds += read()
        self._timings.clear()
        self.report.seconds = sum(step.seconds for step in self.report.steps)
        return self.report

    def release(self) -> None:
        """Frees the caches of a finished run; its report stays, and its symbols, on the host."""
        self._forget()
        self._unload_symbols()

    def _unload_symbols(self) -> None:
        """Those of FG-Attn take gigabytes where clips are long."""
        self.last_symbols = {name: symbols.to("cpu") for name, symbols in self.last_symbols.items()}

    @contextmanager
    def calling(
        self,
        transformer: str,
        context: str | None,
        timestep: torch.Tensor | float,
        shapes: tuple,
        size: Callable[[], ModelSize] = ModelSize,
    ) -> Iterator[Call]:
        """Opens a transformer call and closes it, also when it raises; then the run's caches are dropped.

        Args:
            transformer: its name in the pipeline.
            context: branch as the pipeline names it, or None: then repeated calls in one step are told apart by order.
            timestep: what the pipeline passes to the transformer.
            shapes: shapes of the call's tensors; a change within a run ends that run.
            size: what they make the transformer remember; asked for at a branch's first call.

        Raises:
            MemoryBudgetError: the branch does not fit into the preset's budget together with the run's others.
        """
        on_gpu = isinstance(timestep, torch.Tensor) and timestep.is_cuda
        elapsed = timing.gpu_stopwatch(timestep.device) if on_gpu else timing.stopwatch()
        try:
            self.call = self._open(transformer, context, timestep, shapes, size)
            yield self.call
        except BaseException:
            self._forget()
            raise
        else:
            self._close(self.call)
            self._timings.append((self._step_record, elapsed()))
        finally:
            self.call = None

    def forecast(self, history: History, coordinate: float, order: int | None = None) -> tuple[torch.Tensor, ...]:
        """The feature at ``coordinate``, of at most degree ``order``, each of its tensors a new one."""
        weights = forecast_weights(self.preset.forecast.method, history.coordinates, coordinate, order)
        return tuple(weighted_sum(parts, weights) for parts in zip(*history.values, strict=True))

    def observe(
        self, call: Call, output: tuple[torch.Tensor, ...], judged: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Records the transformer's output and, in the closed loop, judges what the forecast would have been.

        Args:
            output: the tensors of the output; batch first.
            judged: selects the tokens of an output tensor that the pipeline uses.
        """
        if call.tick.repeats is not None:
            return
        history = call.branch.outputs
        if self.preset.schedule.control == "error":
            control = self._controls[call.transformer]
            # A branch's first output judges nothing, so the next step is computed too.
            order, error, previous = 0, math.inf, call.coordinate
            if len(history):
                errors = self._errors(call, output, judged)
                call.branch.order = order = control.best_order(errors)
                error, previous = errors[order], history.coordinates[0]
                self._step_record.error = max(error, self._step_record.error or 0.0)
            control.observe(call.tick.step, call.coordinates, self._error_weights, previous, order, error)
        if self.preset.schedule.control == "error" or self.preset.forecast.scope == "stack":
            # A copy, because pipelines may change the transformer's output in place.
            history.record(call.coordinate, tuple(tensor.detach().clone() for tensor in output))

    def _errors(
        self, call: Call, output: tuple[torch.Tensor, ...], judged: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, float]:
        """For each degree that the history allows, the error that its forecast of ``output`` would have had.

        The host reads them all at once, the one synchronisation of a computed step.
        """
        history = call.branch.outputs
        errors = {}
        for order in range(min(1, history.order), history.order + 1):
            forecast = self.forecast(history, call.coordinate, order)
            parts = [_relative_error(judged(a), judged(b)) for a, b in zip(output, forecast, strict=True)]
            errors[order] = torch.stack(parts).max()  # unlike Python's max, it lets what is no number through
        return dict(zip(errors, torch.stack(list(errors.values())).tolist(), strict=True))

    def read_densities(self, call: Call) -> None:
        """Moves the densities of new symbols to the host, all layers at once, and decides which layers degrade."""
        if not call.densities:
            return
        values = torch.stack(list(call.densities.values())).tolist()
        for name, (rows, row_blocks, tiles, attended, projected) in zip(call.densities, values, strict=True):
            site = call.site(name)
            site.row_density, site.row_block_density = rows, row_blocks
            site.tile_density, site.attended, site.bias_density = tiles, attended, projected
            site.degraded = rows < self.preset.reuse.degrade_below

    def fall_back(self, site: str, reason: str) -> None:
        """Notes that a site ran densely though the preset asked for less."""
        entry = {"site": site, "reason": reason}
        if entry not in self.report.fallbacks:
            self.report.fallbacks.append(entry)

    def _forget(self, why: str | None = None) -> None:
        """Drops the run's caches; ``why`` goes to the report, once however often it happens in a step."""
        note = f"{why} at step {self._step_record.index}: caches dropped" if why else None
        if note and note not in self.report.notes:
            self.report.notes.append(note)
        self._branches: dict[tuple[str, str], BranchState] = {}
        self._controls: dict[str, FixedControl | ErrorControl] = {}
        self._decisions: dict[str, StepMode] = {}
        self._computed_steps: dict[str, int] = {}  # latest step of each transformer that was decided to compute

    def _open(
        self,
        transformer: str,
        context: str | None,
        timestep: torch.Tensor | float,
        shapes: tuple,
        size: Callable[[], ModelSize],
    ) -> Call:
        tick = self._clock.read(timestep)
        if self._tick is None or tick.run is not self._tick.run:
            self.reset()
            self._coordinates = tick.coordinates(self.preset.forecast.coordinate)
            in_latents = self.preset.schedule.error_in == "latents"
            self._error_weights = tick.latent_weights() if in_latents else None
            if tick.repeats is not None:
                self.report.notes.append(f"every step computed: {tick.repeats}")
        if self._tick is None or tick.step != self._tick.step:
            self._start_step(tick)
        self._tick = tick
        branch = self._branch(transformer, context, shapes, size)
        mode = self._mode(transformer, tick, branch)
        schedule = self.preset.schedule
        records = mode is StepMode.UPDATE or (
            mode is StepMode.FULL and tick.step < schedule.warmup and schedule.interval != 1 and tick.repeats is None
        )
        computes = mode is not StepMode.DISPATCH and tick.step >= schedule.warmup and tick.repeats is None
        skips = computes and self.preset.skip.steps == "all"
        if mode is StepMode.UPDATE:
            branch.fetch_after(None)
        return Call(transformer, mode, tick, self._coordinates, branch, records, skips)

    def _start_step(self, tick: Tick) -> None:
        self._decisions.clear()
        self._anonymous_calls.clear()
        self._called.clear()
        self._step_record = StepRecord(tick.step, tick.timesteps[tick.step], StepMode.DISPATCH.value)
        self._step_work: dict[str, list[tuple[float, float]]] = {}
        self.report.steps.append(self._step_record)
        for layer in self.report.density:
            layer.append(None)

    def _branch(
        self, transformer: str, context: str | None, shapes: tuple, size: Callable[[], ModelSize]
    ) -> BranchState:
        if context is None:
            count = self._anonymous_calls[transformer] = self._anonymous_calls.get(transformer, 0) + 1
            context = f"call {count}"
        key = (transformer, context)
        if key in self._branches and self._branches[key].shapes != shapes:
            self._forget("shapes changed")
        elif key in self._called:  # another pipeline's loop over the same transformer, which this clock can't follow
            self._forget("branch called twice")
        self._called.add(key)
        if key not in self._branches:
            # Where a second transformer has taken over, what the first remembers would only take up memory.
            at_work = {name for name, _ in self._called}
            at_rest = [known for known in self._branches if known[0] not in at_work]
            if at_rest:
                self._unload_symbols()
            self._branches = {known: branch for known, branch in self._branches.items() if known not in at_rest}
            self._branches[key] = self._new_branch(shapes, size())
        return self._branches[key]

    def _new_branch(self, shapes: tuple, size: ModelSize) -> BranchState:
        """A branch under a memory plan for it and those there are, which may change how these keep what they have."""
        memory = plan_memory(self.preset, [*(branch.size for branch in self._branches.values()), size])
        for branch in self._branches.values():
            branch.adopt(memory)
        self.report.estimated_bytes = memory.device_bytes
        self.report.memory_measures = list(memory.measures)
        return BranchState(shapes, size, memory)

    def _mode(self, transformer: str, tick: Tick, branch: BranchState) -> StepMode:
        """The step's mode, decided once a step and transformer; a branch that can't forecast yet computes."""
        if tick.repeats is not None:
            return StepMode.FULL
        if transformer not in self._controls:
            self._controls[transformer] = make_control(self.preset.schedule)
        if transformer not in self._decisions:
            self._decisions[transformer] = self._controls[transformer].mode(tick.step, tick.steps)
            if self._decisions[transformer] is not StepMode.DISPATCH:
                self._computed_steps[transformer] = tick.step
        mode = self._decisions[transformer]
        ready = len(branch.outputs) if self.preset.forecast.scope == "stack" else branch.updated
        # A branch that was not called then, as where guidance was off, has older records than the gap was chosen for.
        stale = branch.computed_step < self._computed_steps.get(transformer, -1)
        return StepMode.UPDATE if mode is StepMode.DISPATCH and (stale or not ready) else mode

    def _close(self, call: Call) -> None:
        if call.densities and call.branch is next(iter(self._branches.values())):
            drawn = {name: call.site(name).symbols for name in call.densities}
            self.last_symbols |= {name: symbols for name, symbols in drawn.items() if symbols is not None}
        if call.mode is not StepMode.DISPATCH:
            call.branch.computed_step = call.tick.step
        call.branch.updated |= call.mode is StepMode.UPDATE or (call.records and self.preset.forecast.scope == "layer")
        work_rank = _MODES_BY_WORK.index
        if work_rank(call.mode) > work_rank(StepMode(self._step_record.mode)):
            self._step_record.mode = call.mode.value
        self._account(call)

    def _account(self, call: Call) -> None:
        report = self.report
        rows = dict(zip(report.layers, report.density, strict=True))
        for layer, (computed, plain) in call.work.items():
            self._computed += computed
            self._plain += plain
            shares = self._step_work.setdefault(layer, [])
            shares.append((computed, plain))
            rows[layer][-1] = sum(share for share, _ in shares) / sum(whole for _, whole in shares)
        report.computed_fraction = self._computed / self._plain if self._plain else 1.0
        if call.mode is not StepMode.DISPATCH:
            branches = self._branches.values()
            device = _distinct_bytes(tensor for branch in branches for tensor in branch.tensors())
            host = _distinct_bytes(tensor for branch in branches for tensor in branch.host_tensors())
            report.cache_bytes, report.host_bytes = max(report.cache_bytes, device), max(report.host_bytes, host)
            budget = self.preset.memory.budget_gib
            note = "caches took more than was expected, and more than memory.budget_gib"
            if budget is not None and device > budget * GIB and note not in report.notes:
                report.notes.append(note)


def _distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all storages behind the tensors, each counted once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def _relative_error(value: torch.Tensor, forecast: torch.Tensor) -> torch.Tensor:
    """``‖F − F̂‖ / ‖F‖`` of the worst sample; the host reads one number."""
    value, forecast = value.float().flatten(1), forecast.float().flatten(1)
    return ((value - forecast).norm(dim=1) / value.norm(dim=1)).max()
