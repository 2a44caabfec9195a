"""Verify and time ops and their baselines, and collect the rows; ops that can't run are noted with the reason."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dit_accel.errors import BackendError, UnsupportedError, headline
from dit_accel.kernels.symbols import AttentionPlan
from scripts.bench.kernels.cases import Case
from scripts.bench.kernels.clock import Timer, median_ms
from scripts.bench.kernels.report import shape_label
from scripts.bench.kernels.verify import Verdict

Verify = Callable[[Any], Verdict]  # verifies the output of an op


@dataclass
class Recorder:
    """Collects the rows of one run; `log` is called with one line per row."""

    device: str
    backends: Sequence[str]
    log: Callable[[str], None] = field(default_factory=lambda: partial(print, flush=True))
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def time(
        self,
        op: str,
        backend: str,
        kind: str,
        case: Case,
        call: Callable[[], object],
        verify: Verify | Verdict,
        *,
        timer: Timer = median_ms,
        **figures: Any,
    ) -> float | None:
        """Verify and time one op; return its milliseconds, or None if it can't run or its result is wrong.

        `verify` may be a verdict that is already known; other arguments are those of `add`.
        """
        try:
            verdict = verify if isinstance(verify, Verdict) else verify(_poisoned_first(call))
        except (BackendError, UnsupportedError) as error:
            self._leave_out(f"{op} {kind} {shape_label(case.axes)}", backend, str(error))
            return None
        ms = timer(call, self.device) if verdict.passed else None
        self.add(op, backend, kind, case, verdict, ms, **figures)
        return ms

    def add(
        self,
        op: str,
        backend: str,
        kind: str,
        case: Case,
        verdict: Verdict,
        ms: float | None,
        *,
        density: float = 1.0,
        ideal: float | None = None,
        work: float = 0.0,
        unit: str = "TFLOP/s",
        baselines: dict[str, float] | None = None,
    ) -> None:
        """Add one row; without `ms` it has no speed-up.

        `kind`: variant of the op. `density`: computed share of the random symbols. `ideal`: speed-up over the dense
        baseline if time were proportional to work; None = 1 / density. `work`: floating-point operations that remain
        with the symbols, or bytes with the unit "GB/s". `baselines`: milliseconds of the alternatives.
        """
        baselines = baselines or {}
        if ideal is None:
            ideal = 1 / density if density else float("inf")
        row = {
            "op": op,
            "backend": backend,
            "kind": kind,
            "shape": case.axes,
            "sparsity": 1 - density,
            "ideal": ideal,
            "ms": ms,
            "rate": None if ms is None or not work else work / ms / (1e9 if unit == "TFLOP/s" else 1e6),
            "unit": unit,
            "baselines_ms": baselines,
            "speedup": {} if ms is None else {name: other / ms for name, other in baselines.items()},
            **verdict.fields(),
        }
        self.rows.append(row)
        over = "  ".join(f"{ratio:.2f}x {name}" for name, ratio in row["speedup"].items())
        outcome = (
            f"{ms:9.4f} ms  {over}" if verdict.passed else f"FAILED: error {verdict.error:.3g} > {verdict.bound:.3g}"
        )
        self.log(f"{op:18}{backend:10}{kind:24} {shape_label(case.axes):34}{row['sparsity']:6.1%}  {outcome}")

    def baselines(
        self, place: str, makes: dict[str, Callable[[], Callable]], verify: Verify, timer: Timer = median_ms
    ) -> dict[str, float]:
        """Milliseconds of the alternatives that `makes` makes; one that can't run or is wrong is left out and noted."""
        times = {}
        for name, make in makes.items():
            try:
                call = make()
                verdict = verify(_poisoned_first(call))
                if verdict.passed:
                    times[name] = timer(call, self.device)
                    continue
                reason = f"its error {verdict.error:.3g} is above {verdict.bound:.3g}"
            except Exception as error:  # third-party packages: any exception is a reason to note
                reason = headline(error)
            self._leave_out(place, name, reason)
        return times

    def offers(self, place: str, backend: str, call: Callable[[], object]) -> bool:
        """Run ``call``; return False and add a note if the backend refuses it."""
        try:
            call()
        except (BackendError, UnsupportedError) as error:
            self._leave_out(place, backend, str(error))
            return False
        return True

    def _leave_out(self, place: str, who: str, reason: str) -> None:
        if any((entry["who"], entry["reason"]) == (who, reason) for entry in self.left_out):
            return  # noted already
        self.left_out.append({"what": place, "who": who, "reason": reason})
        self.log(f"left out: {who} for {place}: {reason}")


def _poisoned_first(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, after filling the memory of a first result with NaN or -1.

    Otherwise a kernel that writes nothing could return the previous call's result from the memory freed last.
    """
    result = call()
    held = result.tensors() if isinstance(result, AttentionPlan) else result if isinstance(result, tuple) else [result]
    for tensor in held:
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    del result, held, tensor
    return call()
