"""Decides the mode of every transformer call, and keeps the state of one run and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch

from dit_accel.kernels import weighted_sum
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop import timing
from dit_accel.loop.branch import BranchState, Call, Judgement, PromptState
from dit_accel.loop.forecast import History, best_share, corrector_weights, forecast_weights, relative_error
from dit_accel.loop.memory import GIB, ModelSize, plan_memory
from dit_accel.loop.report import AttentionRecord, RunReport, StepRecord
from dit_accel.loop.rows import Rows, join_rows, take_rows
from dit_accel.loop.tracker import (
    AdaptiveControl,
    IntervalControl,
    SchedulerClock,
    StepMode,
    Tick,
    TimestepClock,
    make_control,
)
from dit_accel.presets import Preset

_MODES_BY_WORK = [StepMode.DISPATCH, StepMode.UPDATE, StepMode.FULL]
WHOLE_BATCH: tuple[Rows, ...] = (None,)  # all its samples as one prompt


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
        prompts: Callable[[], Sequence[Rows]] = lambda: WHOLE_BATCH,
    ) -> Iterator[Call]:
        """Opens a transformer call and closes it, also when it raises; then the run's caches are dropped.

        Args:
            transformer: its name in the pipeline.
            context: branch as the pipeline names it, or None: then repeated calls in one step are told apart by order.
            timestep: what the pipeline passes to the transformer.
            shapes: shapes of the call's tensors; a change within a run ends that run.
            size: what they make the transformer remember; asked for at a branch's first call.
            prompts: rows of each prompt whose steps are decided apart; asked for likewise.

        Raises:
            MemoryBudgetError: the branch does not fit into the preset's budget together with the run's others.
        """
        on_gpu = isinstance(timestep, torch.Tensor) and timestep.is_cuda
        elapsed = timing.gpu_stopwatch(timestep.device) if on_gpu else timing.stopwatch()
        try:
            self.call = self._open(transformer, context, timestep, shapes, size, prompts)
            yield self.call
        except BaseException:
            self._forget()
            raise
        else:
            self._close(self.call)
            self._timings.append((self._step_record, elapsed()))
        finally:
            self.call = None

    def forecast(self, history: History, coordinate: float, order: float | None = None) -> tuple[torch.Tensor, ...]:
        """The feature at ``coordinate``, of at most degree ``order``, each of its tensors a new one."""
        weights = forecast_weights(self.preset.forecast.method, history.coordinates, coordinate, order)
        return tuple(weighted_sum(parts, weights) for parts in zip(*history.values, strict=True))

    def forecast_output(self, call: Call) -> tuple[torch.Tensor, ...]:
        """The transformer's output, forecast for every prompt."""
        prompts = call.branch.prompts
        return _joined(prompts, [self._forecast_prompt(call, prompt) for prompt in prompts])

    def _forecast_prompt(self, call: Call, prompt: PromptState) -> tuple[torch.Tensor, ...]:
        prompt.forecast_steps.append(call.tick.step)
        return self.forecast(prompt.outputs, call.coordinate, prompt.order)

    def observe(
        self, call: Call, output: tuple[torch.Tensor, ...], judged: Callable[[torch.Tensor, Rows], torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Records the transformer's output and, in the closed loop, judges what the forecast would have been.

        Args:
            output: the tensors of the output, batch first: of ``call.computed_rows``.
            judged: selects the tokens of an output tensor that the pipeline uses; the tensor holds these samples.

        Returns:
            What the pipeline is to go on with, for the whole batch: the output itself, corrected for what forecasts
            before it missed if the preset says so, and forecasts for prompts that don't compute.
        """
        if call.tick.repeats is not None:
            return output
        prompts, rows = call.branch.prompts, call.computed_rows
        parts: list[tuple[torch.Tensor, ...]] = []
        for place, prompt in enumerate(prompts):
            if place not in call.computing:
                parts.append(self._forecast_prompt(call, prompt))
                continue
            own = prompt.rows if rows is None or prompt.rows is None else [rows.index(row) for row in prompt.rows]
            part = output if own is None else tuple(take_rows(tensor, own) for tensor in output)
            parts.append(self._observe_prompt(call, place, part, judged))
        return _joined(prompts, parts)

    def _observe_prompt(
        self,
        call: Call,
        place: int,
        output: tuple[torch.Tensor, ...],
        judged: Callable[[torch.Tensor, Rows], torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        prompt = call.branch.prompts[place]
        result = self._corrected(call, prompt, output)
        closed_loop = self.preset.schedule.control == "adaptive"
        if closed_loop:
            call.judgements[place] = self._judge(call, prompt, output, partial(judged, rows=prompt.rows))
        if closed_loop or self.preset.forecast.level == "output":
            # A copy, because pipelines may change the transformer's output in place.
            prompt.outputs.record(call.coordinate, tuple(tensor.detach().clone() for tensor in output))
        return result

    def _corrected(self, call: Call, prompt: PromptState, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The output of a computed step that also makes good what the forecasts before it missed."""
        steps, prompt.forecast_steps = prompt.forecast_steps, []
        moves = call.tick.moves
        if not self.preset.forecast.corrector or not steps or moves is None or moves[call.tick.step] == 0.0:
            return output
        history = prompt.outputs
        forecasts = [(call.coordinates[step], moves[step] / moves[call.tick.step]) for step in steps]
        weights = corrector_weights(
            self.preset.forecast.method, history.coordinates, prompt.order, call.coordinate, forecasts
        )
        return tuple(weighted_sum(parts, weights) for parts in zip(output, *history.values, strict=True))

    def _judge(
        self,
        call: Call,
        prompt: PromptState,
        output: tuple[torch.Tensor, ...],
        judged: Callable[[torch.Tensor], torch.Tensor],
    ) -> Judgement:
        """What each degree's forecast of ``output`` would have missed, and what share of the slope fits it best."""
        history = prompt.outputs
        damps = self.preset.forecast.damping and history.order > 0
        orders: list[float] = list(range(min(1, history.order), history.order + 1)) if len(history) else []
        if damps and prompt.damped is not None:
            orders.append(prompt.damped)
        errors, damped = {}, None
        for order in orders:
            forecast = self.forecast(history, call.coordinate, order)
            parts = [relative_error(judged(a), judged(b)) for a, b in zip(output, forecast, strict=True)]
            errors[order] = torch.stack(parts).max()  # unlike Python's max, it lets what is no number through
            if damps and order == 1:
                damped = best_share(*(map(judged, parts) for parts in (output, history.values[0], forecast)))
        return Judgement(history.coordinates, errors, damped)

    def read(self, call: Call) -> None:
        """Moves what a call has measured to the host, all of it at once, and decides by it what later calls do.

        This is the one synchronisation of a computed step.
        """
        judged = [value.view(1) for judgement in call.judgements.values() for value in judgement.measured]
        measured = [*judged, *call.densities.values()]
        values = torch.cat(measured).tolist() if measured else []
        self._take_errors(call, values[: len(judged)])
        self._take_densities(call, values[len(judged) :])

    def _take_errors(self, call: Call, values: list[float]) -> None:
        """Lets the closed loop set each prompt's degree and its next computed step."""
        remaining = iter(values)
        for place, judgement in call.judgements.items():
            prompt, control = call.branch.prompts[place], self._controls[call.transformer, place]
            errors = {degree: next(remaining) for degree in judgement.errors}
            # A branch's first output judges nothing, so the next step is computed too.
            order: float = 0
            error = math.inf
            if errors:
                order = control.best_order(errors)
                error = errors[order]
                prompt.go_on_with(order, self.preset.forecast.beyond)
                self._step_record.error = max(error, self._step_record.error or 0.0)
            if judgement.damped is not None:
                prompt.refit(next(remaining))
            control.observe(call.tick.step, call.coordinates, self._error_weights, judgement.nodes, order, error)

    def _take_densities(self, call: Call, values: list[float]) -> None:
        """Decides by the densities of new symbols and the probe's errors which layers degrade, and how much their
        attention may leave out from now on.
        """
        each = iter(values)
        for name, measured in call.densities.items():
            rows, row_blocks, tiles, attended, projected, error = islice(each, len(measured))
            site = call.site(name)
            site.row_density, site.row_block_density = rows, row_blocks
            site.tile_density, site.attended, site.bias_density = tiles, attended, projected
            site.degraded = rows < self.preset.reuse.degrade_below
            probed = error if name in call.probed else None
            if call.skips:
                self.report.attentions.append(AttentionRecord(name, call.tick.step, attended, probed))
            target = self.preset.skip.at(name).probe_error
            if probed is not None and target is not None:
                site.tighten(probed, target)

    def note(self, remark: str) -> None:
        """A remark on the run as a whole, once."""
        if remark not in self.report.notes:
            self.report.notes.append(remark)

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
        # By transformer and place of the prompt in its branches:
        self._controls: dict[tuple[str, int], IntervalControl | AdaptiveControl] = {}
        self._decisions: dict[tuple[str, int], StepMode] = {}
        self._computed_steps: dict[tuple[str, int], int] = {}  # the latest that was decided to compute

    def _open(
        self,
        transformer: str,
        context: str | None,
        timestep: torch.Tensor | float,
        shapes: tuple,
        size: Callable[[], ModelSize],
        prompts: Callable[[], Sequence[Rows]],
    ) -> Call:
        tick = self._clock.read(timestep)
        if self._tick is None or tick.run is not self._tick.run:
            self.reset()
            self._coordinates = tick.coordinates(self.preset.forecast.coordinate)
            self._error_weights = tick.error_weights(self.preset.schedule.error_in)
            if tick.repeats is not None:
                self.report.notes.append(f"every step computed: {tick.repeats}")
            elif self.preset.forecast.corrector and tick.moves is None:
                self.report.notes.append("nothing corrected: the scheduler is not known to take plain Euler steps")
        if self._tick is None or tick.step != self._tick.step:
            self._start_step(tick)
        self._tick = tick
        branch = self._branch(transformer, context, shapes, size, prompts)
        modes = tuple(self._mode(transformer, tick, branch, place) for place in range(len(branch.prompts)))
        mode = max(modes, key=_MODES_BY_WORK.index)
        schedule = self.preset.schedule
        records = mode is StepMode.UPDATE or (
            mode is StepMode.FULL and tick.step < schedule.warmup and schedule.interval != 1 and tick.repeats is None
        )
        computes = mode is not StepMode.DISPATCH and tick.step >= schedule.warmup and tick.repeats is None
        skips = computes and self.preset.skip.steps == "all"
        if mode is StepMode.UPDATE:
            branch.fetch_after(None)
        return Call(transformer, mode, modes, tick, self._coordinates, branch, records, skips)

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
        self,
        transformer: str,
        context: str | None,
        shapes: tuple,
        size: Callable[[], ModelSize],
        prompts: Callable[[], Sequence[Rows]],
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
            self._branches[key] = self._new_branch(shapes, size(), prompts())
        return self._branches[key]

    def _new_branch(self, shapes: tuple, size: ModelSize, prompts: Sequence[Rows]) -> BranchState:
        """A branch under a memory plan for it and those there are, which may change how these keep what they have."""
        memory = plan_memory(self.preset, [*(branch.size for branch in self._branches.values()), size])
        for branch in self._branches.values():
            branch.adopt(memory)
        self.report.estimated_bytes = memory.device_bytes
        self.report.memory_measures = list(memory.measures)
        return BranchState(shapes, size, memory, [PromptState(memory.order, rows) for rows in prompts])

    def _mode(self, transformer: str, tick: Tick, branch: BranchState, place: int) -> StepMode:
        """A prompt's mode, decided once a step and transformer; a branch that can't forecast yet computes."""
        if tick.repeats is not None:
            return StepMode.FULL
        key, prompt = (transformer, place), branch.prompts[place]
        if key not in self._controls:
            self._controls[key] = make_control(self.preset.schedule)
        if key not in self._decisions:
            self._decisions[key] = self._controls[key].mode(tick.step, tick.steps)
            if self._decisions[key] is not StepMode.DISPATCH:
                self._computed_steps[key] = tick.step
        mode = self._decisions[key]
        ready = len(prompt.outputs) if self.preset.forecast.level == "output" else branch.updated
        # A branch that was not called then, as where guidance was off, has older records than the gap was chosen for.
        stale = prompt.computed_step < self._computed_steps.get(key, -1)
        return StepMode.UPDATE if mode is StepMode.DISPATCH and (stale or not ready) else mode

    def _close(self, call: Call) -> None:
        if call.densities and call.branch is next(iter(self._branches.values())):
            drawn = {name: call.site(name).symbols for name in call.densities}
            self.last_symbols |= {name: symbols for name, symbols in drawn.items() if symbols is not None}
        for place in call.computing:
            call.branch.prompts[place].computed_step = call.tick.step
        call.branch.updated |= call.mode is StepMode.UPDATE or (call.records and self.preset.forecast.level == "layer")
        work_rank = _MODES_BY_WORK.index
        if work_rank(call.mode) > work_rank(StepMode(self._step_record.mode)):
            self._step_record.mode = call.mode.value
        self._account(call)

    def _account(self, call: Call) -> None:
        report = self.report
        rows = dict(zip(report.layers, report.density, strict=True))
        for layer, (of_batch, plain) in call.work.items():
            computed = of_batch * call.computed_share
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


def _joined(prompts: Sequence[PromptState], parts: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The output of the whole batch from those of its prompts."""
    if len(prompts) == 1:
        return parts[0]
    rows = [prompt.rows for prompt in prompts]
    return tuple(join_rows(tensors, rows) for tensors in zip(*parts, strict=True))


def _distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all storages behind the tensors, each counted once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
