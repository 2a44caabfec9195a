"""Published methods that forecast the transformer's output, with the computed steps fixed before the run.

Most were published for outputs of blocks. Here each forecasts the transformer's output, like TaylorSeer lite, and no
block runs in a forecast step. Formulas and settings are the cited sources', as docs/notes/comparisons.md reads them.

A forecast is a weighted sum of records. The weights depend on the records' steps or on their inner products.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
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
from dit_accel.tools.measure.compare.mean_velocity import average_velocities, velocity_costs
from dit_accel.tools.measure.compare.methods import Peer, Subject

HOOK = "dit_accel_rival"
MOVES = ("skipped", "whole")  # steps that MeanCache's mean velocity moves: the skipped steps, or the whole interval


class Record(NamedTuple):
    """Output of the transformer, or its forecast, at a step."""

    step: int
    output: torch.Tensor  # [B, ...]
    computed: bool


@dataclass(frozen=True)
class Plan:
    """Computed steps, and the forecast for the others."""

    computed: Collection[int]
    forecast: Callable[[Sequence[Record], int], torch.Tensor]  # from all earlier records, for a step
    moved: Collection[int] = ()  # computed steps whose output is still replaced by a forecast that includes it


def weighted(records: Sequence[Record], weights: np.ndarray) -> torch.Tensor:
    """Weighted sum of the records in float32; weights are ``[records]``, or ``[B, records]`` per sample."""
    newest = records[-1].output
    shares = torch.from_numpy(np.asarray(weights, np.float32)).to(newest.device)
    total = torch.zeros_like(newest, dtype=torch.float32)
    for share, record in zip(shares.unbind(-1), records, strict=True):
        total += share.reshape(-1, *[1] * (newest.ndim - 1)) * record.output.float()
    return total.to(newest.dtype)


def spectrum(records: Sequence[Record], step: int, *, steps: int, blend: float) -> torch.Tensor:
    """Spectrum: Chebyshev polynomials up to degree 4 through all computed records, by ridge regression at 0.1.

    ``blend`` is the polynomial's share; the rest is the line through the last two records. 1 is the paper's predictor,
    and its authors' code (hanjq17/Spectrum) recommends 0.5 to 1. Steps of the whole run are mapped to [-1, 1].
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


def hicache(records: Sequence[Record], step: int, order: int, scale: float) -> torch.Tensor:
    """HiCache: TaylorSeer with Hermite polynomials, ``sⁿ Hₙ(s k)``, instead of the powers ``kⁿ``.

    k is the distance from the last computed step, and s, here ``scale``, the paper's sigma in (0, 1).
    """
    known = [record for record in records if record.computed]
    rows = differences([record.step for record in known], order)
    distance = scale * (step - known[-1].step)
    values = (np.polynomial.hermite.hermval(distance, unit) for unit in np.eye(len(rows)))
    basis = [value * scale**n / math.factorial(n) for n, value in enumerate(values)]
    return weighted(known, np.array(basis) @ rows)


def foca(records: Sequence[Record], step: int) -> torch.Tensor:
    """FoCa: BDF2 gives a forecast, and the trapezoidal rule (Heun) corrects it.

    The derivative of the ODE is the slope of the last two computed records. Both formulas start from the last records.
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
    """Dynamic mode decomposition as in cache-dit's calibrator: powers of the linear map from record to record.

    It uses the last 4 to 6 evenly spaced computed records of each sample; modes below 1e-4 of the first are noise. With
    fewer records it is TaylorSeer of order 1. Only the records' inner products are decomposed.
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
    return weighted(recent, np.stack([_powers(matrix, (step - at[-1]) / spacings[-1]) for matrix in products]))


def _powers(products: np.ndarray, distance: float) -> np.ndarray:
    """Return weights ``[records]`` of a forecast ``distance`` spacings ahead, from inner products of the records."""
    reuse = np.eye(len(products))[-1]
    squares, modes = np.linalg.eigh(products[:-1, :-1])
    kept = squares > 1e-8 * squares[-1]
    inverse = modes[:, kept] / np.sqrt(squares[kept])
    try:
        factors, vectors = np.linalg.eig(inverse.T @ products[:-1, 1:] @ inverse)
        mixing = inverse @ vectors  # modes over all records but the oldest
        between = mixing.conj().T @ products[1:]
        start = np.linalg.lstsq(between[:, 1:] @ mixing, between[:, -1], rcond=None)[0]
    except np.linalg.LinAlgError:  # e.g. if all records are zero
        return reuse
    weights = np.concatenate([[0.0], (mixing @ (factors.astype(complex) ** distance * start)).real])
    return weights if np.isfinite(weights).all() else reuse


def every(interval: int, warmup: int, steps: int) -> set[int]:
    """Return the first ``warmup`` steps, then every N-th step, and the last one."""
    return {step for step in range(steps) if step < warmup or (step - warmup + 1) % interval == 0 or step == steps - 1}


def widening(interval: float, growth: float, steps: int) -> set[int]:
    """Return Spectrum's steps: the first 5, then at an interval (rounded down) that grows with each step."""
    computed, latest = set(range(min(5, steps))), 4
    while (latest := latest + math.floor(interval)) < steps:
        computed.add(latest)
        interval += growth
    return computed


class _Forecasting(Hook):
    """Hook that runs a transformer in a plan's computed steps, and forecasts its output in the others."""

    def __init__(self, scheduler: Any, plan: Plan) -> None:
        super().__init__()
        self._scheduler, self._plan = scheduler, plan
        self._step = self._branch = -1
        self._structure: Any = None  # container of the transformer's single output tensor
        # By branch, which follows from the order of calls.
        self.trails: defaultdict[int, list[Record]] = defaultdict(list)

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        scheduler = self._scheduler
        # Relative to this run, which may begin in the middle of the schedule.
        step = 0 if scheduler.step_index is None else scheduler.step_index - (scheduler.begin_index or 0)
        if step < self._step:  # another run
            self.trails.clear()
        self._branch = self._branch + 1 if step == self._step else 0
        self._step = step
        trail = self.trails[self._branch]
        if computed := step in self._plan.computed or not trail:
            leaves, self._structure = pytree.tree_flatten(self.fn_ref.original_forward(*args, **kwargs))
            if len(leaves) != 1:
                model = type(module).__name__
                raise UnsupportedError(f"{model} must return one tensor, got {len(leaves)}: leave this method out")
            output = leaves[0]
            trail.append(Record(step, output, computed=True))
        if not computed or step in self._plan.moved:
            output = self._plan.forecast(trail, step)
        if not computed:
            trail.append(Record(step, output, computed=False))
        return pytree.tree_unflatten([output], self._structure)


@contextmanager
def forecasting(pipe: Any, plan: Plan) -> Iterator[list[_Forecasting]]:
    """Within the block, run the pipeline's transformers by a plan; yield the hooks that hold their records."""
    hooks = {module: _Forecasting(pipe.scheduler, plan) for module in denoisers(pipe).values()}
    try:
        for module, hook in hooks.items():
            register_hook(module, hook, HOOK)
        yield list(hooks.values())
    finally:
        for module in hooks:
            remove_hook(module, HOOK)


def _rival(
    series: str, name: str, settings: Sequence[tuple], plan: Callable[..., Plan], *why_not: Callable[[Any], str | None]
) -> Peer:
    @contextmanager
    def put_on(subject: Subject, *setting: Any) -> Iterator[dict[str, Any]]:
        with forecasting(subject.pipe, plan(subject, *setting)):
            yield {}

    return Peer(series, f"{series} {name}", settings, put_on, *why_not)


def _plan_spectrum(subject: Subject, interval: int, growth: float, blend: float) -> Plan:
    return Plan(widening(interval, growth, subject.steps), partial(spectrum, steps=subject.steps, blend=blend))


def _plan_interval(subject: Subject, warmup: int, interval: int, *values: float, forecast: Callable[..., Any]) -> Plan:
    return Plan(every(interval, warmup, subject.steps), lambda records, step: forecast(records, step, *values))


def _plan_meancache(subject: Subject, share: float, moves: str) -> Plan:
    """Plan of MeanCache: the mean velocity until the next computed step, as weights on the latest records."""
    if "meancache" not in subject.calibrations:
        with forecasting(subject.pipe, Plan(range(subject.steps), foca)) as hooks:
            subject.tuning_run()
        trails = [[record.output for record in trail] for hook in hooks for trail in hook.trails.values()]
        sigmas = subject.pipe.scheduler.sigmas.tolist()
        subject.calibrations["meancache"] = {moved: velocity_costs(trails, sigmas, moved == "whole") for moved in MOVES}
    costs = subject.calibrations["meancache"][moves]
    computed, weights = average_velocities(costs, round(share * subject.steps), moves == "whole")

    def forecast(records: Sequence[Record], step: int) -> torch.Tensor:
        return weighted(records[-len(weights[step]) :], weights[step])

    return Plan(computed, forecast, moved=weights.keys() & computed)


def _without_sigmas(pipe: Any) -> str | None:
    return None if hasattr(pipe.scheduler, "sigmas") else f"{type(pipe.scheduler).__name__} has no sigmas"


# Interval, its growth, and the polynomial's share of the forecast. The paper's settings grow by 0.75 and 3.
_SPECTRUM = [(2, 0.0, 0.5), (2, 0.1, 0.5), (2, 0.25, 0.5), (2, 0.75, 0.5), (2, 0.75, 1.0), (2, 1.5, 0.5)]
_SPECTRUM += [(2, 3.0, 0.5), (2, 3.0, 1.0)]
# Maximum share of computed steps, and the steps that the mean velocity moves.
_MEANCACHE = [(0.2, "skipped"), (0.25, "skipped"), (0.3, "skipped"), (0.3, "whole"), (0.35, "whole"), (0.4, "whole")]
_MEANCACHE += [(0.5, "whole")]
# Warm-up, interval, order and scale; warm-up and interval.
_HICACHE = [(3, 2, 2, 0.7), (3, 3, 2, 0.7), (3, 4, 2, 0.7), (3, 5, 2, 0.7), (3, 6, 1, 0.7)]
_HICACHE += [(3, 4, 2, 0.5), (3, 6, 2, 0.5), (3, 7, 2, 0.5)]
_INTERVALS = [(3, 2), (3, 3), (3, 4), (3, 5), (3, 6), (3, 7), (8, 4)]

FORECASTERS = {
    "spectrum": _rival("Spectrum", "N={} a={} w={}", _SPECTRUM, _plan_spectrum),
    "meancache": _rival("MeanCache", "B={} {}", _MEANCACHE, _plan_meancache, _without_sigmas),
    "hicache": _rival("HiCache", "W={0} D={2} N={1} s={3}", _HICACHE, partial(_plan_interval, forecast=hicache)),
    "foca": _rival("FoCa", "W={} N={}", _INTERVALS, partial(_plan_interval, forecast=foca)),
    "dmd": _rival("DMD", "W={} N={}", _INTERVALS, partial(_plan_interval, forecast=dmd)),
}
