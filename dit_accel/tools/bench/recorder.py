"""Rows of a run: each verified, then timed, beside its baselines; what can't run is noted with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dit_accel.errors import BackendError, UnsupportedError
from dit_accel.tools.bench.cases import Case, Inputs
from dit_accel.tools.bench.clock import median_ms
from dit_accel.tools.bench.sizes import Projection
from dit_accel.tools.bench.verify import Verdict

Timer = Callable[[Callable[[], object], str], float]


def _print(line: str) -> None:
    print(line, flush=True)


@dataclass
class Recorder:
    """Collects the rows of one run.

    Args:
        device: "cuda" or "cpu".
        backends: backends to time, where an op has them.
        log: takes one line a row.
    """

    device: str
    backends: Sequence[str]
    log: Callable[[str], None] = _print
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def time(
        self,
        op: str,
        backend: str,
        kind: str,
        shape: dict[str, int],
        call: Callable[[], object],
        verify: Callable[[], Verdict],
        *,
        sparsity: float = 0.0,
        ideal: float = 1.0,
        work: float = 0.0,
        unit: str = "TFLOP/s",
        baselines: dict[str, float] | None = None,
        timer: Timer = median_ms,
    ) -> float | None:
        """Verifies and times one op, and returns its milliseconds; None where it can't run or is wrong.

        Args:
            kind: what of the op varies beside shape and sparsity.
            shape: names and lengths of the op's axes, ``tokens`` among them.
            call: runs the op.
            verify: runs the op as well, and judges its result.
            sparsity: share left out, as drawn.
            ideal: speed-up over the dense baseline if time followed the work.
            work: floating-point operations that the symbols leave, or bytes with the unit "GB/s".
            baselines: milliseconds of the alternatives.
            timer: milliseconds of a call.
        """
        try:
            verdict = verify()
        except (BackendError, UnsupportedError) as error:
            self._leave_out(f"{op} {kind} {_label(shape)}", backend, str(error))
            return None
        ms = timer(call, self.device) if verdict.passed else None
        self.add(op, backend, kind, shape, verdict, ms, sparsity, ideal, work, unit, baselines or {})
        return ms

    def offers(self, place: str, backend: str, call: Callable[[], object]) -> bool:
        """Runs ``call``; False, and a note, where the backend refuses it."""
        try:
            call()
        except (BackendError, UnsupportedError) as error:
            self._leave_out(place, backend, str(error))
            return False
        return True

    def add(
        self,
        op: str,
        backend: str,
        kind: str,
        shape: dict[str, int],
        verdict: Verdict,
        ms: float | None,
        sparsity: float,
        ideal: float,
        work: float,
        unit: str,
        baselines: dict[str, float],
    ) -> None:
        """Notes one row; arguments as those of :meth:`time`. Without ``ms`` it has no speed-up."""
        row = {
            "op": op,
            "backend": backend,
            "kind": kind,
            "shape": shape,
            "sparsity": sparsity,
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
        self.log(f"{op:18}{backend:10}{kind:24} {_label(shape):34}{sparsity:6.1%}  {outcome}")

    def baseline(
        self,
        name: str,
        place: str,
        make: Callable[[], Callable[[], torch.Tensor]],
        verify: Callable[..., Verdict],
        timer: Timer = median_ms,
    ) -> float | None:
        """Milliseconds of an alternative; None where it can't run here or its result is wrong, which is noted."""
        try:
            call = make()
            verdict = verify(call)
            if verdict.passed:
                return timer(call, self.device)
            reason = f"its error {verdict.error:.3g} is above {verdict.bound:.3g}"
        except Exception as error:  # other people's packages: whatever keeps them from running is a reason to note
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        self._leave_out(place, name, reason)
        return None

    def _leave_out(self, place: str, who: str, reason: str) -> None:
        if any((entry["who"], entry["reason"]) == (who, reason) for entry in self.left_out):
            return  # one note will do
        self.left_out.append({"what": place, "who": who, "reason": reason})
        self.log(f"left out: {who} for {place}: {reason}")


def shape_of(case: Case) -> dict[str, int]:
    return {"tokens": case.tokens, "heads": case.heads, "head_dim": case.head_dim, "block": case.block}


def projection_shape(projection: Projection) -> dict[str, int]:
    return {name: getattr(projection, name) for name in ("tokens", "heads", "head_dim", "width")}


def poisoned_first(call: Callable[[], Any], *results: torch.Size, like: torch.Tensor) -> Any:
    """The result of ``call``, whose memory most likely held NaN before.

    Tensors of its results' shapes are filled and freed, and torch's allocator hands out again what was freed last.
    Without it a kernel that writes nothing could find the right result of the call before.
    """
    poison = [like.new_full(shape, torch.nan) for shape in results]
    del poison
    return call()


def case_sparsity(inputs: Inputs) -> dict[str, float]:
    """``sparsity`` and ``ideal`` of the tiles as drawn."""
    return {"sparsity": 1 - inputs.density, "ideal": 1 / inputs.density if inputs.density else float("inf")}


def measured(times: dict[str, float | None]) -> dict[str, float]:
    """Those that have a time."""
    return {name: ms for name, ms in times.items() if ms is not None}


def _label(shape: dict[str, int]) -> str:
    return " ".join(f"{name}={length}" for name, length in shape.items() if name not in ("head_dim", "block"))
