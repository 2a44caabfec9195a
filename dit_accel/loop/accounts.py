"""Add the cost of each call to the report of a run: FLOPs, seconds and memory."""

from collections.abc import Callable, Iterable

import torch

from dit_accel.loop.branch import BranchState, Call
from dit_accel.loop.memory import GIB
from dit_accel.loop.report import PromptRecord, RunReport, StepRecord
from dit_accel.loop.tracker import StepMode, Tick

MODES_BY_WORK = [StepMode.DISPATCH, StepMode.UPDATE, StepMode.FULL]
LEAST = StepMode.DISPATCH.value
NOTHING = 0.0, 0.0  # FLOPs


class Accounts:
    """Fill the report of one run; it notes caches that exceed ``budget_gib``."""

    def __init__(self, report: RunReport, budget_gib: float | None) -> None:
        self.report = report
        self._budget_gib = budget_gib
        self._timings: list[tuple[StepRecord, Callable[[], float]]] = []
        self._computed = self._plain = 0.0
        self._computed_of: list[float] = []  # FLOPs by prompt

    def begin(self) -> None:
        """Record that there is a call; what runs without the loop is computed in full."""
        if self.report.computed_fraction is None:
            self.report.computed_fraction = 1.0

    def start_step(self, tick: Tick) -> None:
        """Open the record of a step."""
        self.step = StepRecord(tick.step, tick.timesteps[tick.step], LEAST)
        self.report.steps.append(self.step)
        self.begin()
        self._layers: dict[str, tuple[float, float]] = {}  # computed and plain FLOPs of this step's calls
        self._pairs = 0.0, 0.0  # computed and plain FLOPs of query-key pairs
        for layer in self.report.density:
            layer.append(None)
        for prompt in self.report.prompts:
            prompt.modes.append(LEAST)
            prompt.errors.append(None)

    def take_error(self, error: float, place: int, output: str | None = None) -> None:
        """Record the forecast error of this step for one prompt, and the output that decided; the largest counts."""
        if output is not None and error >= (self.step.error or 0.0):
            self.step.decided_by = output
        self.step.error = max(error, self.step.error or 0.0)
        if place < len(self.report.prompts):
            errors = self.report.prompts[place].errors
            errors[-1] = max(error, errors[-1] or 0.0)

    def take_time(self, elapsed: Callable[[], float]) -> None:
        """Keep a function that returns the seconds of one call of this step; :meth:`read_times` calls it at the end."""
        self._timings.append((self.step, elapsed))

    def take_call(self, call: Call, branches: Iterable[BranchState]) -> None:
        """Add a call to the report, and the memory of the run's branches."""
        report = self.report
        if call.mode is not StepMode.DISPATCH:
            self.step.mode = _most(self.step.mode, call.mode)
        if len(call.modes) > 1 or report.prompts:
            self._take_prompts(call)
        rows, share = dict(zip(report.layers, report.density, strict=True)), call.computed_share if call.work else 0.0
        pairs, plain_pairs = self._pairs
        for layer, (plain, plain_own) in call.branch.plain.items():
            computed, attended = call.work.get(layer, NOTHING)
            computed, attended = computed * share, attended * share
            self._computed, self._plain = self._computed + computed, self._plain + plain
            pairs, plain_pairs = pairs + attended, plain_pairs + plain_own
            before, before_plain = self._layers.get(layer, NOTHING)
            self._layers[layer] = before + computed, before_plain + plain
            rows[layer][-1] = (before + computed) / (before_plain + plain)
        self._pairs = pairs, plain_pairs
        self.step.attended = pairs / plain_pairs if plain_pairs else None
        report.computed_fraction = self._computed / self._plain if self._plain else 1.0
        for prompt, computed in zip(report.prompts, self._computed_of, strict=True):
            prompt.computed_fraction = computed / self._plain if self._plain else 1.0
        if call.mode is not StepMode.DISPATCH:
            branches = list(branches)
            device = distinct_bytes(tensor for branch in branches for tensor in branch.tensors())
            host = distinct_bytes(tensor for branch in branches for tensor in branch.host_tensors())
            report.cache_bytes, report.host_bytes = max(report.cache_bytes, device), max(report.host_bytes, host)
            if self._budget_gib is not None and device > self._budget_gib * GIB:
                report.note("caches took more memory than estimated, and more than memory.budget_gib")

    def _take_prompts(self, call: Call) -> None:
        """Add a call to the record of each prompt, if every call of the run so far has decided prompts separately."""
        prompts, steps = self.report.prompts, len(self.report.steps)
        if self._plain == 0.0 and len(call.modes) > 1:
            prompts[:] = [PromptRecord([LEAST] * steps, [None] * steps) for _ in call.modes]
            self._computed_of = [0.0] * len(prompts)
        if len(call.modes) != len(prompts):
            prompts.clear()
            self._computed_of.clear()
        computed = sum([of_batch for of_batch, _ in call.work.values()])
        for place, prompt in enumerate(prompts):
            prompt.modes[-1] = _most(prompt.modes[-1], call.modes[place])
            self._computed_of[place] += computed if place in call.computing else 0.0

    def read_times(self) -> None:
        """Read all times, which waits for the GPU."""
        for record, read in self._timings:
            record.seconds += read()
        self._timings.clear()
        self.report.seconds = sum(step.seconds for step in self.report.steps)


def _most(mode: str, other: StepMode) -> str:
    return max(StepMode(mode), other, key=MODES_BY_WORK.index).value


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all storages behind the tensors, each counted once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
