"""What a run costs, call by call, into its report: FLOPs, seconds and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from dit_accel.loop.branch import BranchState, Call
from dit_accel.loop.memory import GIB
from dit_accel.loop.report import RunReport, StepRecord
from dit_accel.loop.tracker import StepMode, Tick

MODES_BY_WORK = [StepMode.DISPATCH, StepMode.UPDATE, StepMode.FULL]


class Accounts:
    """Fills the report of one run.

    Args:
        report: of a run that begins.
        budget_gib: device memory that caches may take; None = any.
    """

    def __init__(self, report: RunReport, budget_gib: float | None) -> None:
        self.report = report
        self._budget_gib = budget_gib
        self._timings: list[tuple[StepRecord, Callable[[], float]]] = []
        self._computed = self._plain = 0.0

    def start_step(self, tick: Tick) -> None:
        """Opens the record of a step."""
        self.step = StepRecord(tick.step, tick.timesteps[tick.step], StepMode.DISPATCH.value)
        self.report.steps.append(self.step)
        self._work: dict[str, list[tuple[float, float]]] = {}
        self._attention: list[tuple[float, float]] = []
        for layer in self.report.density:
            layer.append(None)

    def take_error(self, error: float) -> None:
        """What a forecast of this step missed; the worst of the step counts."""
        self.step.error = max(error, self.step.error or 0.0)

    def take_time(self, elapsed: Callable[[], float]) -> None:
        """Of a call of this step, in seconds, to be read at the end."""
        self._timings.append((self.step, elapsed))

    def take_call(self, call: Call, branches: Iterable[BranchState]) -> None:
        """What a call has done.

        Args:
            branches: of the run, whose caches take memory.
        """
        if MODES_BY_WORK.index(call.mode) > MODES_BY_WORK.index(StepMode(self.step.mode)):
            self.step.mode = call.mode.value
        report = self.report
        rows = dict(zip(report.layers, report.density, strict=True))
        for layer, (of_batch, plain) in call.work.items():
            computed = of_batch * call.computed_share
            self._computed += computed
            self._plain += plain
            shares = self._work.setdefault(layer, [])
            shares.append((computed, plain))
            rows[layer][-1] = _share(shares)
        self._attention += [(computed * call.computed_share, plain) for computed, plain in call.attention.values()]
        self.step.attended = _share(self._attention) if self._attention else None
        report.computed_fraction = self._computed / self._plain if self._plain else 1.0
        if call.mode is not StepMode.DISPATCH:
            branches = list(branches)
            device = _distinct_bytes(tensor for branch in branches for tensor in branch.tensors())
            host = _distinct_bytes(tensor for branch in branches for tensor in branch.host_tensors())
            report.cache_bytes, report.host_bytes = max(report.cache_bytes, device), max(report.host_bytes, host)
            if self._budget_gib is not None and device > self._budget_gib * GIB:
                report.note("caches took more than was expected, and more than memory.budget_gib")

    def read_times(self) -> None:
        """Reads all times, which waits for the GPU."""
        for record, read in self._timings:
            record.seconds += read()
        self._timings.clear()
        self.report.seconds = sum(step.seconds for step in self.report.steps)


def _share(parts: Sequence[tuple[float, float]]) -> float:
    return sum(computed for computed, _ in parts) / sum(plain for _, plain in parts)


def _distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all storages behind the tensors, each counted once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
