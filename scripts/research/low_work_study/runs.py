"""Run a demo model in one process, with methods that are compared with its plain images or videos."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from dit_accel.models import denoisers
from dit_accel.tools.compare import PEERS, Method, Subject
from dit_accel.tools.compare.snapshot import Snapshot
from dit_accel.tools.compare.work import WorkCounter
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.metrics import lpips_distance
from dit_accel.tools.timing import transformer_clock
from scripts.demo_training.judging import attributes, differences
from scripts.demo_training.prompts import HeldOutPrompt
from scripts.research.conditions_study.cells import HELD_OUT, run

from .settings import ALONE, Search, few_settings, low_settings, searches

NEAR = 0.05  # maximum distance of a setting from the wanted fraction
CLOSE = 0.03  # the same for a search, which stops within half of it
TRIES = 10
PROBED = 4  # prompts that estimate the fraction of adaptive methods

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Model and conditions of a measurement.

    Args:
        model: a demo model's name.
        folder: folder of its pipeline.
        store: folder of the plain outputs, shared by all processes.
        steps, size: steps and size of a run; None = the model's own.
        fractions: wanted computed fractions; none = any.
        prompts: number of prompts of the split.
        batch: prompts per batch.
        alone: number of prompts for methods that decide for a batch as a whole and get prompts one by one.
        changes: keys of the closed loop's preset, with their values.
    """

    model: str
    folder: str
    store: str
    steps: int | None
    size: int | None
    fractions: tuple[float, ...]
    prompts: int
    batch: int
    alone: int
    split: str
    dtype: str
    device: str
    peers: tuple[str, ...]
    changes: tuple[tuple[str, Any], ...] = ()


class Runs:
    """A pipeline to which methods are applied, and the work of its plain run."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        self.case = case
        self.pipe = DiffusionPipeline.from_pretrained(case.folder, dtype=getattr(torch, case.dtype))
        self.pipe.to(case.device).set_progress_bar_config(disable=True)
        given = {"num_inference_steps": case.steps, "height": case.size, "width": case.size}
        own = demo_arguments(Path(case.folder))
        self._arguments = own | {key: value for key, value in given.items() if value is not None}
        self.steps = self._arguments["num_inference_steps"]
        self.prompts = HELD_OUT[case.model](case.prompts, case.split)
        self._counter = WorkCounter(denoisers(self.pipe))
        with self._counter.calibrating(), transformer_clock(self.pipe) as clock:
            self.paint(self.prompts[:1])
        self.subject = Subject(self.pipe, self.steps, max(1, clock.calls // self.steps), self._tune)
        self.reasons = {name: PEERS[name].why_not(self.pipe) for name in case.peers}
        able = [name for name, reason in self.reasons.items() if reason is None]
        changes = dict(case.changes)
        self.searches = searches(self.pipe, able, changes) if case.fractions else {}
        settings = (
            low_settings(self.pipe, self.steps, able)
            if case.fractions
            else few_settings(self.pipe, self.steps, able, changes)
        )
        self.methods = {method.name: method for method in settings}
        self._snapshot = Snapshot(self.pipe)

    def paint(self, prompts: Sequence[HeldOutPrompt], **changes: Any) -> torch.Tensor:
        """Run prompts in one batch and return the outputs."""
        return run(self.pipe, self._arguments | changes, prompts)

    def plain(self) -> torch.Tensor:
        return torch.cat([self.paint(group) for group in _groups(self.prompts, self.case.batch)])

    def _tune(self) -> None:
        tuning = HELD_OUT[self.case.model](1, "tuning" if self.case.split == "reporting" else "reporting")
        self.paint(tuning)

    def prompts_of(self, method: Method) -> list[HeldOutPrompt]:
        return self.prompts[: self.case.alone] if method.series in ALONE else self.prompts

    def made(self, method: Method, prompts: Sequence[HeldOutPrompt]) -> tuple[torch.Tensor, float]:
        """Outputs and computed fraction of a method; in batches, or one by one if the method requires it."""
        try:
            with method.put_on(self.subject):
                pass  # calibrates here if needed, before work is counted
            groups = _groups(prompts, 1 if method.series in ALONE else self.case.batch)
            parts = [self._made(method, group) for group in groups]
        finally:
            self._snapshot.restore()
        return torch.cat([part for part, _ in parts]), sum(work for _, work in parts) / len(prompts)

    def _made(self, method: Method, group: Sequence[HeldOutPrompt]) -> tuple[torch.Tensor, float]:
        """Outputs of one batch, and its work in plain runs of one prompt."""
        with ExitStack() as stack:
            if not method.reports_work:
                counted = stack.enter_context(self._counter.counting())
            changes = stack.enter_context(method.put_on(self.subject))
            made = self.paint(group, **changes)
            if method.reports_work:
                return made, len(group) * self.pipe.dit_accel.report().computed_fraction
            return made, counted()

    def searched(self, search: Search, wanted: float) -> tuple[Method, torch.Tensor, float]:
        """Find the method's number nearest to a fraction, by bisection over the number's logarithm."""
        low, high = math.log(search.low), math.log(search.high)
        best: tuple[Method, torch.Tensor, float] | None = None
        for _ in range(TRIES):
            middle = (low + high) / 2
            method = search.of(math.exp(middle))
            found = (method, *self.made(method, self.prompts_of(method)))
            if best is None or abs(found[2] - wanted) < abs(best[2] - wanted):
                best = found
            if abs(best[2] / wanted - 1) <= CLOSE / 2:
                break
            low, high = (middle, high) if found[2] > wanted else (low, middle)
        return best


@lru_cache(maxsize=1)
def runs_of(case: Case) -> Runs:
    """Return the model of this process, which keeps the latest one."""
    return Runs(case)


def begin(case: Case) -> tuple[Case, list[tuple[str, float | None]], list[Row], dict[str, str]]:
    """Store the plain outputs; return the names to measure (with a wanted fraction for searches), the plain run's rows,
    and the reasons of missing methods.
    """
    runs = runs_of(case)
    made = runs.plain()
    torch.save(made, _stored(case))
    tasks = [(name, fraction) for fraction in case.fractions for name in runs.searches]
    tasks += [(name, None) for name in runs.methods]
    counts = sorted({case.prompts, case.alone}, reverse=True)
    rows = [_row(runs, Method("plain", "plain", None), made[:count], 1.0) for count in counts]
    return case, tasks, rows, {name: reason for name, reason in runs.reasons.items() if reason is not None}


def measure(case: Case, name: str, wanted: float | None) -> Row:
    """Measure a setting, or a search's method at the wanted fraction.

    If it fails the row has `error`; if it misses the wanted fraction, the row has only the computed fraction.
    """
    runs = runs_of(case)
    try:
        if wanted is not None:
            method, made, computed = runs.searched(runs.searches[name], wanted)
            wanted = near(computed, [wanted], CLOSE)
        else:
            method = runs.methods[name]
            probed = runs.prompts_of(method)[: PROBED if method.series in ALONE else 1]
            computed = runs.made(method, probed)[1] if case.fractions else 1.0
            wanted = near(computed, case.fractions)
            if wanted is not None or not case.fractions:
                made, computed = runs.made(method, runs.prompts_of(method))
        if case.fractions and wanted is None:
            return _told(case, method, computed)
        return _row(runs, method, made, computed) | {"at": wanted}
    except Exception as error:  # any failure; the other methods go on
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"model": case.model, "steps": runs.steps, "series": name, "name": name, "error": told}


def near(computed: float, fractions: Sequence[float], within: float = NEAR) -> float | None:
    """Return the wanted fraction that is close to a computed one, or None."""
    return next((wanted for wanted in fractions if abs(computed / wanted - 1) <= within), None)


def _groups(prompts: Sequence[HeldOutPrompt], size: int) -> list[Sequence[HeldOutPrompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _told(case: Case, method: Method, computed: float) -> Row:
    return {
        "model": case.model,
        "steps": runs_of(case).steps,
        "series": method.series,
        "name": method.name,
        "computed": round(computed, 4),
    }


def _row(runs: Runs, method: Method, made: torch.Tensor, computed: float) -> Row:
    case, device = runs.case, runs.case.device
    plain = torch.load(_stored(case), mmap=True)[: len(made)]
    if not bool(made.isfinite().all()):
        raise ValueError("outputs hold values that are not finite")
    return {
        **_told(case, method, computed),
        "prompts": len(made),
        "right": attributes(made.to(device), runs.prompts[: len(made)]),
        **differences(made, plain, device, _lpips(device)),
        "shown": _shown(made[0]),
    }


@lru_cache(maxsize=1)
def _lpips(device: str) -> Callable[[torch.Tensor, torch.Tensor], float] | None:
    found = lpips_distance(torch.device(device))
    return found if callable(found) else None


def _stored(case: Case) -> Path:
    return Path(case.store, f"{case.model}-{case.steps}.pt")


def _shown(made: torch.Tensor) -> np.ndarray:
    """First image, or middle frame of the first video: uint8 [3, H, W]."""
    picture = made if made.ndim == 3 else made[len(made) // 2]
    return (255 * picture).round().byte().numpy()
