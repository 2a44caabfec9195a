"""Rivals that forecast the transformer's output, where the steps to compute are known before the run.

Most were published for outputs of blocks. Here each forecasts what leaves the transformer, as TaylorSeer lite does, so
that no block runs in a step that is left out. Formulas and settings come from the sources that are named at each;
docs/notes/comparisons.md says what is our reading of them.

A forecast is a sum of records, under weights that follow from the records' steps or from their inner products.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dit_accel.errors import UnsupportedError
from dit_accel.models import denoisers
from dit_accel.models.hooks import Hook, register_hook, remove_hook
from dit_accel.tools.compare.mean_velocity import average_velocities, velocity_costs
from dit_accel.tools.compare.methods import Method, Peer, Subject

HOOK = "dit_accel_rival"
MOVES = ("skipped", "whole")  # what MeanCache's mean velocity moves: the steps that are left out, or the interval


class Record(NamedTuple):
    """What the transformer, or a forecast in its place, gave at a step."""

    step: int
    output: torch.Tensor  # [B, ...]
    computed: bool


@dataclass(frozen=True)
class Plan:
    """The steps that are computed, and what stands in for the others."""

    computed: Collection[int]
    forecast: Callable[[Sequence[Record], int], torch.Tensor]  # from all records so far, for a step
    moved: Collection[int] = ()  # computed steps in which the pipeline gets a forecast all the same, made with theirs


def weighted(records: Sequence[Record], weights: np.ndarray) -> torch.Tensor:
    """The records' sum in float32, under weights ``[records]``, or ``[B, records]`` where samples have their own."""
    newest = records[-1].output
    shares = torch.from_numpy(np.asarray(weights, np.float32)).to(newest.device)
    total = torch.zeros_like(newest, dtype=torch.float32)
    for share, record in zip(shares.unbind(-1), records, strict=True):
        total += share.reshape(-1, *[1] * (newest.ndim - 1)) * record.output.float()
    return total.to(newest.dtype)


def spectrum(records: Sequence[Record], step: int, *, steps: int, blend: float) -> torch.Tensor:
    """Spectrum: Chebyshev polynomials up to degree 4 through all computed records, by ridge regression at 0.1.

    ``blend`` of it is mixed with the line through the last two records; 1 is the paper's predictor, and its authors'
    code (hanjq17/Spectrum) recommends 0.5 to 1. Steps of the whole run are mapped to [-1, 1].
    """
    known = [record for record in records if record.computed]
    at = np.array([record.step for record in known])
    design = np.polynomial.chebyshev.chebvander(2 * at / steps - 1, 4)
    target = np.polynomial.chebyshev.chebvander(2 * step / steps - 1, 4)[0]
    weights = blend * design @ np.linalg.solve(design.T @ design + 0.1 * np.eye(5), target)
    reach = (step - at[-1]) / (at[-1] - at[-2]) if len(at) > 1 else 0.0
    weights[-1] += (1 - blend) * (1 + reach)
    weights[-2:-1] -= (1 - blend) * reach
    return weighted(known, weights)


def differences(at: Sequence[int], order: int) -> np.ndarray:
    """TaylorSeer's finite differences of records at steps ``at``, as weights ``[up to order + 1, records]``."""
    found = np.zeros((0, len(at)))
    for place, unit in enumerate(np.eye(len(at))):
        rows = [unit]
        for previous in found[:order]:
            rows.append((rows[-1] - previous) / (at[place] - at[place - 1]))
        found = np.stack(rows)
    return found


def hicache(records: Sequence[Record], step: int, *, order: int, scale: float) -> torch.Tensor:
    """HiCache: TaylorSeer with Hermite polynomials, ``sⁿ Hₙ(s k)``, in the place of the powers ``kⁿ``.

    k is the distance from the last computed step, and s, here ``scale``, the paper's sigma in (0, 1).
    """
    known = [record for record in records if record.computed]
    rows = differences([record.step for record in known], order)
    distance = scale * (step - known[-1].step)
    basis = [
        np.polynomial.hermite.hermval(distance, unit) * scale**n / math.factorial(n)
        for n, unit in enumerate(np.eye(len(rows)))
    ]
    return weighted(known, np.array(basis) @ rows)


def foca(records: Sequence[Record], step: int) -> torch.Tensor:
    """FoCa: a step of BDF2 forecasts, and the trapezoidal rule (Heun) calibrates.

    The derivative of the feature's ODE is the slope between the last two computed records; both formulas go on from the
    last records, forecasts among them.
    """
    known = [record for record in records if record.computed]
    if len(known) < 2:
        return known[-1].output
    older, newer = known[-2:]
    slope = (newer.output.float() - older.output.float()) / (newer.step - older.step)
    before, last = (record.output.float() for record in records[-2:])
    forecast = (4 * last - before + 2 * slope) / 3
    return (last + (slope + forecast - last) / 2).to(newer.output.dtype)


def dmd(records: Sequence[Record], step: int) -> torch.Tensor:
    """Dynamic mode decomposition as cache-dit's calibrator has it: powers of the linear map from record to record.

    It takes the last 4 to 6 computed records at even distances, of each sample alone; modes below 1e-4 of the first
    are noise. Where there are fewer it is TaylorSeer of order 1. Records' inner products are all that is decomposed.
    """
    known = [record for record in records if record.computed]
    at = [record.step for record in known]
    spacings = np.diff(at[-6:])
    even = len(spacings) if len(set(spacings)) <= 1 else int(np.argmax(spacings[::-1] != spacings[-1]))
    if even < 3:
        rows = differences(at, 1)
        return weighted(known, float(step - at[-1]) ** np.arange(len(rows)) @ rows)
    recent = known[-even - 1 :]
    flat = torch.stack([record.output.flatten(1).double() for record in recent], 1)  # [B, records, values]
    products = (flat @ flat.mT).cpu().numpy()
    return weighted(recent, np.stack([_powers(each, (step - at[-1]) / spacings[-1]) for each in products]))


def _powers(products: np.ndarray, distance: float) -> np.ndarray:
    """Weights ``[records]`` of a forecast ``distance`` spacings on, from inner products ``[records, records]``."""
    reuse = np.eye(len(products))[-1]
    squares, modes = np.linalg.eigh(products[:-1, :-1])
    kept = squares > 1e-8 * squares[-1]
    inverse = modes[:, kept] / np.sqrt(squares[kept])
    try:
        factors, vectors = np.linalg.eig(inverse.T @ products[:-1, 1:] @ inverse)
        mixing = inverse @ vectors  # modes over all records but the oldest
        between = mixing.conj().T @ products[1:]
        start = np.linalg.lstsq(between[:, 1:] @ mixing, between[:, -1], rcond=None)[0]
    except np.linalg.LinAlgError:  # as where all records are zero
        return reuse
    weights = np.concatenate([[0.0], (mixing @ (factors.astype(complex) ** distance * start)).real])
    return weights if np.isfinite(weights).all() else reuse


def meancache(records: Sequence[Record], step: int, *, weights: Mapping[int, np.ndarray]) -> torch.Tensor:
    """MeanCache: the mean velocity until the next computed step, by weights on the latest records of each step."""
    return weighted(records[-len(weights[step]) :], weights[step])


def every(interval: int, warmup: int, steps: int) -> set[int]:
    """The first ``warmup`` steps, every N-th from there, and the last."""
    return {step for step in range(steps) if step < warmup or (step - warmup + 1) % interval == 0 or step == steps - 1}


def widening(interval: float, growth: float, steps: int) -> set[int]:
    """Spectrum's steps: the first 5, and then at an interval, rounded down, that grows with each."""
    computed, latest = set(range(min(5, steps))), 4
    while (latest := latest + math.floor(interval)) < steps:
        computed.add(latest)
        interval += growth
    return computed


class _Forecasting(Hook):
    """Runs a transformer in the steps that a plan computes, and forecasts its output in the others."""

    def __init__(self, scheduler: Any, plan: Plan) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._plan = plan
        self._step = self._branch = -1
        self._structure: Any = None  # of what the transformer gives around its one tensor
        # By branch, which is told by the order of calls.
        self.trails: defaultdict[int, list[Record]] = defaultdict(list)

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        scheduler = self._scheduler
        # Of this run, which may begin in the middle of the schedule.
        step = 0 if scheduler.step_index is None else scheduler.step_index - (scheduler.begin_index or 0)
        if step < self._step:  # another run
            self.trails.clear()
        self._branch = self._branch + 1 if step == self._step else 0
        self._step = step
        trail = self.trails[self._branch]
        computed = step in self._plan.computed or not trail
        if computed:
            leaves, self._structure = pytree.tree_flatten(self.fn_ref.original_forward(*args, **kwargs))
            if len(leaves) != 1:
                model = type(module).__name__
                raise UnsupportedError(f"{model} must give one tensor to be forecast, got {len(leaves)}: leave it out")
            output = leaves[0]
            trail.append(Record(step, output, computed=True))
        if not computed or step in self._plan.moved:
            output = self._plan.forecast(trail, step)
        if not computed:
            trail.append(Record(step, output, computed=False))
        return pytree.tree_unflatten([output], self._structure)


@contextmanager
def forecasting(pipe: Any, plan: Plan) -> Iterator[list[_Forecasting]]:
    """Within, the pipeline's transformers run by a plan; yields what holds their records."""
    hooks = {module: _Forecasting(pipe.scheduler, plan) for module in denoisers(pipe).values()}
    try:
        for module, hook in hooks.items():
            register_hook(module, hook, HOOK)
        yield list(hooks.values())
    finally:
        for module in hooks:
            remove_hook(module, HOOK)


def _rival(
    series: str,
    name: str,
    settings: Sequence[tuple],
    plan: Callable[..., Plan],
    why_not: Callable[[Any], str | None] = lambda pipe: None,
) -> Peer:
    """A rival whose plan is made for a subject of a setting's values, with which its name is filled in."""

    @contextmanager
    def put_on(subject: Subject, setting: tuple) -> Iterator[dict[str, Any]]:
        with forecasting(subject.pipe, plan(subject, *setting)):
            yield {}

    def of(*setting: Any) -> Method:
        return Method(series, f"{series} {name.format(*setting)}", partial(put_on, setting=setting))

    methods = [of(*each) for each in settings]
    return Peer(lambda steps: methods, why_not, of)


def _plan_spectrum(subject: Subject, interval: int, growth: float, blend: float) -> Plan:
    steps = subject.steps
    return Plan(widening(interval, growth, steps), partial(spectrum, steps=steps, blend=blend))


def _plan_hicache(subject: Subject, warmup: int, order: int, interval: int, scale: float) -> Plan:
    return Plan(every(interval, warmup, subject.steps), partial(hicache, order=order, scale=scale))


def _plan_interval(forecast: Callable[..., torch.Tensor], subject: Subject, warmup: int, interval: int) -> Plan:
    return Plan(every(interval, warmup, subject.steps), forecast)


def _plan_meancache(subject: Subject, share: float, moves: str) -> Plan:
    """What a velocity costs where it stands for others is learned from a run on the tuning prompt."""
    if "meancache" not in subject.calibrations:
        with forecasting(subject.pipe, Plan(range(subject.steps), foca)) as hooks:
            subject.tuning_run()
        trails = [[record.output for record in trail] for hook in hooks for trail in hook.trails.values()]
        sigmas = subject.pipe.scheduler.sigmas.tolist()
        subject.calibrations["meancache"] = {each: velocity_costs(trails, sigmas, each == "whole") for each in MOVES}
    costs = subject.calibrations["meancache"][moves]
    computed, weights = average_velocities(costs, round(share * subject.steps), moves == "whole")
    return Plan(computed, partial(meancache, weights=weights), moved=weights.keys() & computed)


def _without_sigmas(pipe: Any) -> str | None:
    return None if hasattr(pipe.scheduler, "sigmas") else f"{type(pipe.scheduler).__name__} has no sigmas"


# Interval, its growth, and the polynomial's share of the forecast. The paper's settings grow by 0.75 and 3.
_SPECTRUM = [(2, 0.0, 0.5), (2, 0.1, 0.5), (2, 0.25, 0.5), (2, 0.75, 0.5), (2, 0.75, 1.0), (2, 1.5, 0.5)]
_SPECTRUM += [(2, 3.0, 0.5), (2, 3.0, 1.0)]
# Share of the steps that it may compute, and what the mean velocity moves.
_MEANCACHE = [(0.2, "skipped"), (0.25, "skipped"), (0.3, "skipped"), (0.3, "whole"), (0.35, "whole"), (0.4, "whole")]
_MEANCACHE += [(0.5, "whole")]
# Warm-up, order, interval and scale; warm-up and interval.
_HICACHE = [(3, 2, 2, 0.7), (3, 2, 3, 0.7), (3, 2, 4, 0.7), (3, 2, 5, 0.7), (3, 1, 6, 0.7)]
_HICACHE += [(3, 2, 4, 0.5), (3, 2, 6, 0.5), (3, 2, 7, 0.5)]
_INTERVALS = [(3, 2), (3, 3), (3, 4), (3, 5), (3, 6), (3, 7), (8, 4)]

FORECASTERS = {
    "spectrum": _rival("Spectrum", "N={} a={} w={}", _SPECTRUM, _plan_spectrum),
    "meancache": _rival("MeanCache", "B={} {}", _MEANCACHE, _plan_meancache, _without_sigmas),
    "hicache": _rival("HiCache", "W={} D={} N={} s={}", _HICACHE, _plan_hicache),
    "foca": _rival("FoCa", "W={} N={}", _INTERVALS, partial(_plan_interval, foca)),
    "dmd": _rival("DMD", "W={} N={}", _INTERVALS, partial(_plan_interval, dmd)),
}
