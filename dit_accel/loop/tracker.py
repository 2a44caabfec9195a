"""Find the run, the step and the branch of a transformer call.

1. A **run** begins when the scheduler gets new timesteps, or when its steps go back.
2. The **step** is the one that diffusers' cache context gives (``step_index``, in diffusers 0.42), otherwise the
   scheduler's ``step_index``. If the scheduler keeps none, or copies of it take the steps, the step advances when the
   timestep that the transformer gets changes.
3. A run **begins in the middle**, for example image to image, if the scheduler's ``begin_index`` says so. If it is not
   set, the first timestep is looked up in the schedule. The first ``step_index`` confirms that place, or the run begins
   anew there. A timestep of 1 or less is not looked up: pipelines that rescale timesteps pass such numbers.
4. The **branch** of classifier-free guidance is diffusers' cache context, otherwise the place of the call in its step.
5. A run whose steps can't be told apart **computes every step**, and the report says why. This concerns schedulers
   that call the model twice a step, so that two steps share a noise level; a branch that is called twice in several
   steps, for example because the pipeline steps copies of its scheduler; and calls without a timestep. Schedulers that
   draw all noise anew at every step compute every step too, because their outputs do not continue earlier ones. A trial
   of the scheduler's steps shows both (:mod:`dit_accel.loop.moves`).

The clocks in this file find runs and steps; the controller finds branches.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from dit_accel.errors import UnsupportedError, shown
from dit_accel.loop.growth import log_odds
from dit_accel.loop.moves import Moves, SchedulerTrial, try_out

RIGHT = math.pi / 2  # angle between image and noise where there is noise alone
BF16_ROUNDING = 2.0**-8  # pipelines round timesteps to the transformer's dtype
FLOW_SIGMA_MAX = 1.0 + 1e-3  # rounding included
SIGMA_ROUNDING = 1e-4  # relative tolerance for noise levels that a sampler computes again
WHOLE_NOISE = 0.95  # share of new noise that counts as all of it; DDPM has 0.88 in 8 steps, consistency models have 1
ADDS_NOISE = (
    "adds noise at every step, so outputs continue earlier ones less well: more steps are computed, or every step"
)
NO_SCHEDULER = (
    "transformer must be called by a pipeline, got a call after its accelerated pipeline was deleted: for a loop of "
    "your own call accelerate_transformer(transformer, preset, timesteps)"
)
UNCOUNTED = object()  # step_index of a scheduler that counts no steps
RESCALED_MAX = 1.0  # largest timestep that may be a share of the training timesteps


class StepMode(enum.Enum):
    """Mode of a step: FULL computes all, UPDATE also refreshes symbols and caches, DISPATCH forecasts the rest."""

    FULL = "full"
    UPDATE = "update"
    DISPATCH = "dispatch"


@dataclass(frozen=True)
class Tick:
    """Position of a denoising loop."""

    run: object  # object that identifies the run; all calls of one run share it
    step: int  # index of the step in the run, from 0
    steps: int  # number of steps of the run
    timesteps: Sequence[float]  # the scheduler's timesteps, one a step
    # its noise levels, one a step, 0 to 1. Models that predict no flow have unbounded σ: the angle between image and
    # noise, ``atan σ``, over the right angle. The timesteps if it has no sigmas.
    sigmas: Sequence[float]
    plain: str | None = None  # why no step of the run may be forecast, or None
    # factors of a flow's outputs in the latents; None = the latents are no weighted sum, or it is unknown
    moves: Moves | None = None
    # schedules of the second and later outputs by name, if the pipeline has other schedulers for them
    further: Mapping[str, Tick] = field(default_factory=dict)
    noisy: str | None = None  # why outputs continue earlier ones less well than usual, or None

    @property
    def is_last(self) -> bool:
        return self.step + 1 >= self.steps

    def coordinates(self, kind: str) -> Sequence[float]:
        """Return the coordinate of the forecast polynomial at every step of the run.

        Args:
            kind: ``step``, ``sigma``, ``log_odds`` of sigma, or ``auto``: the step, unless the changes of sigma in
                neighbouring steps differ by more than a factor of 2. They do in Mochi's linear-quadratic schedule,
                where the two parts meet; a polynomial in the step fails there.
        """
        if kind == "log_odds":
            return log_odds(self.sigmas) or range(self.steps)
        gaps = [abs(after - before) for before, after in pairwise(self.sigmas)]
        if 0.0 in gaps:  # two steps with one sigma determine no polynomial
            return range(self.steps)
        uneven = any(max(a, b) > 2 * min(a, b) for a, b in pairwise(gaps))
        return self.sigmas if kind == "sigma" or (kind == "auto" and uneven) else range(self.steps)


class Place(NamedTuple):
    """Step of a call as the pipeline gives it."""

    step: int  # index in the pipeline's loop, from 0
    steps: int | None = None  # number of steps of the loop; None = not given


class Clock(Protocol):
    """Reads the position of the denoising loop for a controller.

    Attributes:
        missed_run: True if a run has begun and none of its steps was read; False where no scheduler tells.
    """

    @property
    def missed_run(self) -> bool: ...

    def read(self, timestep: torch.Tensor | float, place: Place | None = None) -> Tick:
        """Return the position of the loop at a call of the model with this timestep, at the place that is given."""


class SchedulerClock:
    """Read the step from a pipeline's diffusers scheduler, by the rules above.

    ``scheduler.step_index`` needs no device synchronisation, and is exact where timesteps round to one bf16 number.

    Args:
        scheduler: returns the pipeline's scheduler, which a user may replace at any time; None = no pipeline is left.
        further: returns the pipeline's schedulers of further outputs by name, in the order of the outputs.
    """

    def __init__(self, scheduler: Callable[[], Any], further: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._scheduler = scheduler
        self._further = further
        self._timesteps: torch.Tensor | None = None
        self._run: object = None
        self._first = self._latest = self._end = 0  # in the scheduler's timesteps
        self._guessed = False  # True = the start of the run is looked up by its timestep
        self._seen = self._scheduler_now()

    @property
    def missed_run(self) -> bool:
        """Return True if the scheduler has begun a run and none of its steps was read; False for another scheduler.

        If a scheduler counts steps, new timesteps alone are no run: Wan Animate sets them after its last segment.
        """
        scheduler, timesteps = self._scheduler_now()
        is_new = scheduler is self._seen[0] and timesteps is not self._seen[1]
        return is_new and getattr(scheduler, "step_index", 0) is not None

    def _scheduler_now(self) -> tuple[Any, Any]:
        scheduler = self._scheduler()
        return scheduler, getattr(scheduler, "timesteps", None)

    def read(self, timestep: torch.Tensor | float, place: Place | None = None) -> Tick:
        """Return the position of the loop at a call of the model with this timestep, at the place that is given.

        Raises:
            UnsupportedError: the pipeline was deleted.
        """
        if (scheduler := self._scheduler()) is None:
            raise UnsupportedError(NO_SCHEDULER)
        if scheduler.timesteps is not self._timesteps:
            self._begin(scheduler, timestep)
        counted: Any = getattr(scheduler, "step_index", UNCOUNTED)
        if place is not None:
            index = self._offset(place) + place.step
        elif counted is UNCOUNTED:
            index = self._counted(timestep)
        else:
            index = self._unstepped(timestep) if counted is None else counted
        # A call after the last step, outside of a pipeline's loop, counts as the last step.
        index = min(index, self._end - 1)
        if index < self._latest or (self._guessed and index > self._latest + 1):
            self._start(scheduler, index)
        self._guessed = self._guessed and counted in (None, UNCOUNTED)
        self._latest = index
        return self._ticks[index - self._first]

    def _offset(self, place: Place) -> int:
        """Return the index of a loop's first step, which is a later one if the loop has fewer steps."""
        return self._end - place.steps if place.steps and place.steps <= self._end else self._first

    def _begin(self, scheduler: Any, timestep: torch.Tensor | float) -> None:
        """Start the run of new timesteps at the scheduler's ``begin_index``, otherwise at the first timestep."""
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
        self._end = len(scheduler.timesteps)
        begun = self._schedule(scheduler)
        further = {name: other for name, other in self._further().items() if _has_steps(other, self._end)}
        others = {name: self._schedule(other) for name, other in further.items()}
        others = {name: other for name, other in others.items() if other.sigmas != begun.sigmas}
        every = begun, *others.values()
        plain = next(filter(None, (other.plain for other in every)), None)
        noisy = next(filter(None, (other.noisy for other in every)), None)
        begun = replace(begun, plain=plain, noisy=noisy, further=others)
        self._ticks = [replace(begun, step=step) for step in range(begun.steps)]
        self._count = self._first
        self._previous: float | None = None

    def _schedule(self, scheduler: Any) -> Tick:
        """Return the first position of a scheduler's run."""
        sigmas = getattr(scheduler, "sigmas", None)
        levels = values = [float(value) for value in scheduler.timesteps.tolist()][self._first :]
        if sigmas is not None and len(sigmas) >= self._end:
            levels = _noise_levels(sigmas[: self._end])[self._first :]
        trial = try_out(scheduler, self._first)
        # With larger sigmas the pipeline may compute the velocity from another kind of output (Cosmos).
        is_flow = sigmas is not None and float(sigmas.max()) <= FLOW_SIGMA_MAX
        plain, moves = _why_plain(scheduler, trial, levels), trial.moves if is_flow else None
        noisy = f"{type(scheduler).__name__} {ADDS_NOISE}" if trial.noise else None
        return Tick(self._run, 0, len(values), values, levels, plain, moves, noisy=noisy)

    def _unstepped(self, timestep: torch.Tensor | float) -> int:
        """Return the index of the step, which only the timestep shows if the pipeline steps copies of the scheduler."""
        value, before = _largest(timestep), self._previous
        self._previous = value
        if before not in (None, value):
            near = self._count, min(self._count + 1, self._end - 1), self._first
            self._count = min(near, key=lambda index: abs(self._ticks[0].timesteps[index - self._first] - value))
        return self._count

    def _counted(self, timestep: torch.Tensor | float) -> int:
        """Return the index of the step, which advances when the timestep changes."""
        value = _largest(timestep)
        if self._previous is not None and value != self._previous:
            self._count += 1
        self._previous = value
        return self._count


class TimestepClock:
    """Read the step from the place that is given, otherwise from the timestep, for a caller's own loop.

    A run starts when the loop returns to an earlier timestep.

    Args:
        timesteps: the values that the loop passes to the transformer, in order.

    Raises:
        UnsupportedError: no timesteps, no numbers, or equal neighbours, which can't be told apart.
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

    def read(self, timestep: torch.Tensor | float, place: Place | None = None) -> Tick:
        """Return the position of the loop at a call of the model with this timestep, at the place that is given.

        Raises:
            UnsupportedError: the timestep is far from all timesteps of the loop.
        """
        value = _largest(timestep)
        step = min(range(len(self._values)), key=lambda index: abs(self._values[index] - value))
        if place is not None and place.step < len(self._values):
            step = place.step
        elif abs(self._values[step] - value) > self._tolerance:
            known = f"{self._values[0]} to {self._values[-1]}; pass the values that the transformer gets"
            raise UnsupportedError(f"timestep {value} is none of the timesteps given, {known}")
        if step < self._step:
            self._run = object()
        self._step = step
        return Tick(self._run, step, len(self._values), self._values, self._values)


class PlaceClock:
    """Read the step from the place that is given, for a caller's own loop whose timesteps are not known.

    A run starts when the step goes back or the number of steps changes. Noise levels count as falling evenly.
    """

    missed_run = False

    def __init__(self) -> None:
        self._run = object()
        self._place = Place(-1)

    def read(self, timestep: torch.Tensor | float, place: Place | None = None) -> Tick:
        """Return the position of the loop at the place that is given.

        Raises:
            UnsupportedError: no place is given, or it is outside of the loop.
        """
        if place is None or place.steps is None or not 0 <= place.step < place.steps:
            rule = "must run in transformer.cache_context(name, step_index=…, num_inference_steps=…) of diffusers 0.42"
            got = f"from 0 on; got {place or 'no step_index'}"
            raise UnsupportedError(f"without timesteps, each call {rule}, {got}")
        if place.step < self._place.step or place.steps != self._place.steps:
            self._run = object()
        self._place = place
        levels = [1 - step / place.steps for step in range(place.steps)]
        return Tick(self._run, place.step, place.steps, levels, levels)


class SigmaClock:
    """Read the step of one run from the noise level at which a sampler calls its model.

    Args:
        sigmas: noise levels before each step and after the last.
        is_flow: True = noise levels of a flow, 0 to 1; False = ratios of noise to image.
        moves, plain: see :class:`Tick`.
    """

    missed_run = False

    def __init__(
        self, sigmas: Sequence[float], is_flow: bool, moves: Moves | None = None, plain: str | None = None
    ) -> None:
        self._sigmas = list(sigmas[:-1])
        # Shares of the largest angle, so that a run that begins in the middle does not look like a flow's.
        self._levels = self._sigmas if is_flow else [math.atan(sigma) / RIGHT for sigma in self._sigmas]
        if plain is None and not all(before > after for before, after in pairwise([*self._sigmas, 0.0])):
            plain = "its noise levels do not fall from step to step"
        self.plain = plain
        self._moves = moves if is_flow else None
        self._run = object()
        self._step = -1

    def step_at(self, sigma: float) -> int | None:
        """Return the index of the step that begins at a noise level; None = no step does."""
        nearest = min(range(len(self._sigmas)), key=lambda step: abs(self._sigmas[step] - sigma))
        return nearest if math.isclose(self._sigmas[nearest], sigma, rel_tol=SIGMA_ROUNDING) else None

    def read(self, timestep: torch.Tensor | float, place: Place | None = None) -> Tick:
        """Return the position of the sampler at a call at a noise level of the run.

        Raises:
            UnsupportedError: no step begins there.
        """
        sigma = _largest(timestep)
        if (step := self.step_at(sigma)) is None:
            raise UnsupportedError(f"timestep must be a noise level of the run, and {sigma} is none of {self._sigmas}")
        if step < self._step:
            self._run = object()
        self._step = step
        return Tick(self._run, step, len(self._sigmas), self._sigmas, self._levels, self.plain, self._moves)


def _noise_levels(sigmas: torch.Tensor) -> list[float]:
    """Return sigmas of a flow unchanged; sigmas of other models, the ratio of noise to image, as shares of an angle.

    All sigmas of a schedule are given, because those of a run that begins in its middle may look like a flow's.
    """
    levels = [float(sigma) for sigma in sigmas]
    return levels if max(map(abs, levels)) <= FLOW_SIGMA_MAX else [math.atan(sigma) / RIGHT for sigma in levels]


def keeps_timesteps(scheduler: Any) -> bool:
    """Return True if a scheduler has the timesteps of a run, as diffusers' schedulers do."""
    timesteps = getattr(scheduler, "timesteps", None)
    return isinstance(timesteps, torch.Tensor) and timesteps.ndim == 1


def _has_steps(scheduler: Any, count: int) -> bool:
    """Return True if a scheduler was given this number of timesteps."""
    return keeps_timesteps(scheduler) and len(scheduler.timesteps) == count


def _why_plain(scheduler: Any, trial: SchedulerTrial, levels: Sequence[float]) -> str | None:
    """Return why no output of a run can be forecast, from the trial of its steps and their noise levels; or None."""
    name = type(scheduler).__name__
    moved = [True] * len(levels) if trial.moves is None else [any(column) for column in zip(*trial.moves, strict=True)]
    twice = sum(a == b for a, b in pairwise(level for level, moves in zip(levels, moved, strict=True) if moves))
    if 3 * twice >= sum(moved) and twice:  # a stage of two begins where the latest one ended
        return f"{name} repeats timesteps (order {math.ceil(len(levels) / (len(levels) - twice))})"
    return f"{name} draws the noise of the latents anew at every step" if trial.noise >= WHOLE_NOISE else None


def _largest(timestep: torch.Tensor | float) -> float:
    """Return the timestep as a number; the maximum if there is one per token (Wan's ``expand_timesteps``)."""
    return float(timestep.max()) if isinstance(timestep, torch.Tensor) else float(timestep)
