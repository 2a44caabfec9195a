"""Which step is this, and which branch? The rules by which calls of a transformer are told apart.

1. A **run** begins when the scheduler gets new timesteps, or when its steps go back.
2. The **step** is the scheduler's own ``step_index``. Where it keeps none, the step advances when the timestep that the
   transformer gets changes.
3. A run **begins in the middle**, as from image to image, where the scheduler's ``begin_index`` says so. Where it says
   nothing, the first timestep may stand in the schedule, and the first ``step_index`` confirms where that is, or the
   run begins anew there. A timestep of 1 or less tells nothing: pipelines that rescale timesteps pass such numbers.
4. The **branch** of classifier-free guidance is diffusers' cache context, else the place of the call within its step.
5. What these can't tell apart **runs plainly**, and the report says why: schedulers of an order above 1, whose calls
   share a timestep; a branch that is called twice in a step again and again, as where the pipeline takes its steps with
   copies of its scheduler; a call without a timestep. So do schedulers that draw the noise of the latents anew at every
   step, after which no output continues those before it.

The clocks here answer for runs and steps, the controller for branches.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from dit_accel.errors import UnsupportedError, shown
from dit_accel.loop.moves import Moves, euler_moves, linear_moves

BF16_ROUNDING = 2.0**-8  # pipelines round timesteps to the transformer's dtype
FLOW_SIGMA_MAX = 1.0 + 1e-3  # rounding included
SIGMA_ROUNDING = 1e-4  # of a noise level that a sampler has computed anew
EULER = "FlowMatchEulerDiscreteScheduler"
CONSISTENCY = frozenset(  # schedulers that go from a clean picture to the next noise level with noise of its own
    ["LCMScheduler", "FlowMatchLCMScheduler", "SCMScheduler", "CMStochasticIterativeScheduler"]
)
NO_SCHEDULER = (
    "transformer must be called by a pipeline, got a call from elsewhere after the pipeline that it was accelerated "
    "with was deleted: for a loop of your own call accelerate_transformer(transformer, preset, timesteps)"
)
RESCALED_MAX = 1.0  # of timesteps as share of those that the model was trained with


class StepMode(enum.Enum):
    """FULL computes everything, UPDATE refreshes symbols and caches too, DISPATCH computes what the symbols ask for."""

    FULL = "full"
    UPDATE = "update"
    DISPATCH = "dispatch"


@dataclass(frozen=True)
class Tick:
    """Where a denoising loop stands.

    Args:
        run: object that is the same for all calls of one run and no other.
        step: index of the step in the run, from 0.
        steps: number of steps of the run.
        timesteps: the scheduler's timesteps, one a step.
        sigmas: its noise levels, one a step, 0 to 1 where the model predicts a flow, else as the angle between picture
            and noise, ``atan σ``, for σ itself grows without bounds; the timesteps where it has none.
        plain: why nothing of the run may be forecast, or None.
        moves: how far a flow's outputs move the latents; None where these are no sum of them, or that is not known.
    """

    run: object
    step: int
    steps: int
    timesteps: Sequence[float]
    sigmas: Sequence[float]
    plain: str | None = None
    moves: Moves | None = None

    def coordinates(self, kind: str) -> Sequence[float]:
        """What forecasts run over, for every step of the run.

        Args:
            kind: ``step``, ``sigma``, or ``auto``: the step unless neighbouring steps differ more than twofold in
                sigma, as at the seam of Mochi's linear-quadratic schedule, which no polynomial in the step crosses.
        """
        gaps = [abs(after - before) for before, after in pairwise(self.sigmas)]
        if 0.0 in gaps:  # two steps at one place determine no polynomial
            return range(self.steps)
        uneven = any(max(a, b) > 2 * min(a, b) for a, b in pairwise(gaps))
        return self.sigmas if kind == "sigma" or (kind == "auto" and uneven) else range(self.steps)


class Clock(Protocol):
    """What tells a controller where the denoising loop stands.

    Attributes:
        missed_run: whether a run has begun of which no step was read.
    """

    @property
    def missed_run(self) -> bool: ...

    def read(self, timestep: torch.Tensor | float) -> Tick:
        """Where the loop stands at a call of the model with this timestep."""


class SchedulerClock:
    """Reads the step from a pipeline's diffusers scheduler, by the rules above.

    ``scheduler.step_index`` needs no device synchronisation, and is exact even where neighbouring timesteps round to
    the same bf16 number.

    Args:
        scheduler: returns the pipeline's current scheduler, which a user may replace at any time; None = the pipeline
            was deleted.
    """

    def __init__(self, scheduler: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self._timesteps: torch.Tensor | None = None
        self._run: object = None
        self._first = self._latest = self._end = 0  # in the scheduler's timesteps
        self._guessed = False  # where the run begins
        self._seen = self._scheduler_now()

    @property
    def missed_run(self) -> bool:
        """Whether the scheduler has begun a run of which no step was read; of another scheduler that is not known.

        New timesteps alone are no run where a scheduler counts steps: Wan Animate sets them behind its last segment.
        """
        scheduler, timesteps = self._scheduler_now()
        is_new = scheduler is self._seen[0] and timesteps is not self._seen[1]
        return is_new and getattr(scheduler, "step_index", 0) is not None

    def _scheduler_now(self) -> tuple[Any, Any]:
        scheduler = self._scheduler()
        return scheduler, getattr(scheduler, "timesteps", None)

    def read(self, timestep: torch.Tensor | float) -> Tick:
        """Where the loop stands at a call of the model with this timestep.

        Raises:
            UnsupportedError: the pipeline was deleted.
        """
        scheduler = self._scheduler()
        if scheduler is None:
            raise UnsupportedError(NO_SCHEDULER)
        if scheduler.timesteps is not self._timesteps:
            self._begin(scheduler, timestep)
        # A call after the last step, outside of a pipeline's loop, counts to it.
        index = min(self._index(scheduler, timestep), self._end - 1)
        if index < self._latest or (self._guessed and index > self._latest + 1):
            self._start(scheduler, index)
        self._guessed = self._guessed and getattr(scheduler, "step_index", None) is None
        self._latest = index
        return Tick(self._run, index - self._first, len(self._values), self._values, self._sigmas, *self._outlook)

    def _begin(self, scheduler: Any, timestep: torch.Tensor | float) -> None:
        """Starts the run of new timesteps where the scheduler says, or else the first timestep stands."""
        begin = getattr(scheduler, "begin_index", None)
        self._guessed = begin is None and getattr(scheduler, "step_index", None) is None
        if self._guessed:
            value, values = _largest(timestep), scheduler.timesteps.tolist()
            nearest = min(range(len(values)), key=lambda index: abs(values[index] - value))
            tells = value > RESCALED_MAX or max(values) <= RESCALED_MAX
            begin = nearest if tells and abs(values[nearest] - value) <= abs(value) * BF16_ROUNDING else 0
        self._start(scheduler, begin or 0)

    def _start(self, scheduler: Any, first: int) -> None:
        self._timesteps, self._seen = scheduler.timesteps, (scheduler, scheduler.timesteps)
        self._run = object()
        self._first = self._latest = first
        values = [float(value) for value in scheduler.timesteps.tolist()]
        self._end = len(values)
        sigmas = getattr(scheduler, "sigmas", None)
        self._values = values[self._first :]
        self._sigmas = self._values
        if sigmas is not None and len(sigmas) >= len(values):
            self._sigmas = _noise_levels(sigmas[: len(values)])[self._first :]
        self._count = self._first
        self._previous: float | None = None
        plain = _why_plain(scheduler)
        self._outlook = plain, None if plain else _flow_moves(scheduler, first)

    def _index(self, scheduler: Any, timestep: torch.Tensor | float) -> int:
        if hasattr(scheduler, "step_index"):
            return self._first if scheduler.step_index is None else scheduler.step_index
        value = _largest(timestep)
        if self._previous is not None and value != self._previous:
            self._count += 1
        self._previous = value
        return self._count


class TimestepClock:
    """Reads the step from the timestep alone, for a caller's own loop over known timesteps.

    A run starts when the loop is back at an earlier timestep.

    Args:
        timesteps: the values that the loop passes to the transformer, in order.

    Attributes:
        missed_run: as that of :class:`SchedulerClock`; here it is never known.

    Raises:
        UnsupportedError: no timesteps, no numbers, or equal neighbours, which could not be told apart.
    """

    missed_run = False

    def __init__(self, timesteps: Sequence[float] | torch.Tensor) -> None:
        try:
            self._values = [float(value) for value in timesteps]
        except (TypeError, ValueError):
            raise UnsupportedError(f"timesteps must be a sequence of numbers, got {shown(timesteps)}") from None
        gaps = [abs(b - a) for a, b in pairwise(self._values)]
        if not self._values or 0 in gaps:
            raise UnsupportedError(
                f"timesteps must be a non-empty sequence without equal neighbours, got {len(self._values)} values"
                + (f", {self._values[gaps.index(0)]} twice in a row" if gaps else "")
            )
        self._tolerance = max(gaps, default=abs(self._values[0]) or 1.0)
        self._run = object()
        self._step = -1

    def read(self, timestep: torch.Tensor | float) -> Tick:
        value = _largest(timestep)
        step = min(range(len(self._values)), key=lambda index: abs(self._values[index] - value))
        if abs(self._values[step] - value) > self._tolerance:
            raise UnsupportedError(
                f"timestep {value} is none of the timesteps given, {self._values[0]} to {self._values[-1]}; pass those "
                "that the transformer gets, in its own scale"
            )
        if step < self._step:
            self._run = object()
        self._step = step
        return Tick(self._run, step, len(self._values), self._values, self._values)


class SigmaClock:
    """Reads the step of one run from the noise level at which a sampler calls its model.

    Args:
        sigmas: noise levels before each step and after the last.
        is_flow: whether they are those of a flow, 0 to 1; else they are noise over picture.
        moves: as those of a :class:`Tick`.
        plain: likewise.

    Attributes:
        missed_run: as that of :class:`SchedulerClock`; here there is one run alone.
    """

    missed_run = False

    def __init__(
        self, sigmas: Sequence[float], is_flow: bool, moves: Moves | None = None, plain: str | None = None
    ) -> None:
        self._sigmas = list(sigmas[:-1])
        # As shares of the largest angle, by which a run that begins in the middle is told from a flow's.
        self._levels = self._sigmas if is_flow else [math.atan(sigma) / (math.pi / 2) for sigma in self._sigmas]
        if plain is None and not all(before > after for before, after in pairwise([*self._sigmas, 0.0])):
            plain = "its noise levels do not fall from step to step"
        self.plain = plain
        self._moves = moves if is_flow else None
        self._run = object()
        self._step = -1

    def step_at(self, sigma: float) -> int | None:
        """Index of the step that begins at a noise level; None = there is none."""
        nearest = min(range(len(self._sigmas)), key=lambda step: abs(self._sigmas[step] - sigma))
        return nearest if math.isclose(self._sigmas[nearest], sigma, rel_tol=SIGMA_ROUNDING) else None

    def read(self, timestep: torch.Tensor | float) -> Tick:
        """Where the sampler stands at a call at a noise level of the run.

        Raises:
            UnsupportedError: no step begins there.
        """
        sigma = _largest(timestep)
        step = self.step_at(sigma)
        if step is None:
            raise UnsupportedError(f"timestep must be a noise level of the run, and {sigma} is none of {self._sigmas}")
        if step < self._step:
            self._run = object()
        self._step = step
        return Tick(self._run, step, len(self._sigmas), self._sigmas, self._levels, self.plain, self._moves)


def _noise_levels(sigmas: torch.Tensor) -> list[float]:
    """Sigmas of a flow as they are; those of other models, noise over picture, as angles."""
    levels = [float(sigma) for sigma in sigmas]
    return levels if max(map(abs, levels)) <= FLOW_SIGMA_MAX else [math.atan(sigma) for sigma in levels]


def _why_plain(scheduler: Any) -> str | None:
    """Why no output of a scheduler's run can be forecast from those before it, or None."""
    name, order = type(scheduler).__name__, getattr(scheduler, "order", 1)
    if order > 1:
        return f"{name} repeats timesteps (order {order})"
    anew = f"{name} draws the noise of the latents anew at every step"
    if getattr(getattr(scheduler, "config", None), "stochastic_sampling", False):
        return f"{anew} (stochastic_sampling)"
    return None if _names(scheduler).isdisjoint(CONSISTENCY) else anew


def _names(scheduler: Any) -> set[str]:
    """Of its class and those that it derives from."""
    return {cls.__name__ for cls in type(scheduler).__mro__}


def _flow_moves(scheduler: Any, first: int) -> Moves | None:
    """How far a flow's outputs move the latents; Euler's steps are known without a trial."""
    sigmas = getattr(scheduler, "sigmas", None)
    # Beyond a flow's sigmas the pipeline may make the velocity of something else that the transformer gives (Cosmos).
    if sigmas is None or float(sigmas.max()) > FLOW_SIGMA_MAX:
        return None
    if EULER in _names(scheduler):
        return euler_moves(sigmas.tolist()[first:])
    return linear_moves(scheduler, first)


def _largest(timestep: torch.Tensor | float) -> float:
    """A timestep per token (Wan's ``expand_timesteps``) counts by its maximum."""
    return float(timestep.max()) if isinstance(timestep, torch.Tensor) else float(timestep)
