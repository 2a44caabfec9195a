"""Which step is this? Clocks turn what a pipeline shows (its scheduler, the timestep it passes) into a step index."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.moves import Moves, euler_moves, linear_moves

BF16_ROUNDING = 2.0**-8  # pipelines round timesteps to the transformer's dtype
FLOW_SIGMA_MAX = 1.0 + 1e-3  # rounding included
EULER = "FlowMatchEulerDiscreteScheduler"


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
        repeats: why the run's timesteps repeat and nothing may be forecast, or None.
        moves: how far a flow's outputs move the latents; None where these are no sum of them, or that is not known.
    """

    run: object
    step: int
    steps: int
    timesteps: Sequence[float]
    sigmas: Sequence[float]
    repeats: str | None = None
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


class SchedulerClock:
    """Reads the step from a pipeline's diffusers scheduler.

    A run starts when ``scheduler.timesteps`` is a new tensor. The step comes from ``scheduler.step_index`` where the
    scheduler keeps one (no device synchronisation, and exact even where neighbouring timesteps round to the same
    bf16 number), else it advances when the timestep that the transformer gets changes.

    Args:
        scheduler: returns the pipeline's current scheduler, which a user may replace at any time.
    """

    def __init__(self, scheduler: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self._timesteps: torch.Tensor | None = None
        self._seen = self._scheduler_now()

    @property
    def missed_run(self) -> bool:
        """Whether the scheduler has begun a run of which no step was read; of another scheduler that is not known."""
        scheduler, timesteps = self._scheduler_now()
        return scheduler is self._seen[0] and timesteps is not self._seen[1]

    def _scheduler_now(self) -> tuple[Any, Any]:
        scheduler = self._scheduler()
        return scheduler, getattr(scheduler, "timesteps", None)

    def read(self, timestep: torch.Tensor | float) -> Tick:
        scheduler = self._scheduler()
        if scheduler.timesteps is not self._timesteps:
            self._start(scheduler, timestep)
        # A call after the last step, outside of a pipeline's loop, counts to it.
        step = min(self._index(scheduler, timestep) - self._first, len(self._values) - 1)
        return Tick(self._timesteps, step, len(self._values), self._values, self._sigmas, self._repeats, self._moves)

    def _start(self, scheduler: Any, timestep: torch.Tensor | float) -> None:
        self._timesteps, self._seen = scheduler.timesteps, (scheduler, scheduler.timesteps)
        values = [float(value) for value in scheduler.timesteps.tolist()]
        self._first = getattr(scheduler, "begin_index", None) or 0
        if getattr(scheduler, "begin_index", None) is None and getattr(scheduler, "step_index", None) is None:
            # Video-to-video begins in the middle and may not say so. Pipelines that rescale timesteps always do.
            value = _largest(timestep)
            nearest = min(range(len(values)), key=lambda index: abs(values[index] - value))
            if abs(values[nearest] - value) <= abs(value) * BF16_ROUNDING:
                self._first = nearest
        sigmas = getattr(scheduler, "sigmas", None)
        self._values = values[self._first :]
        self._sigmas = self._values
        if sigmas is not None and len(sigmas) >= len(values):
            self._sigmas = _noise_levels(sigmas[: len(values)])[self._first :]
        self._count = self._first
        self._previous: float | None = None
        order = getattr(scheduler, "order", 1)
        self._repeats = f"{type(scheduler).__name__} repeats timesteps (order {order})" if order > 1 else None
        self._moves = _flow_moves(scheduler, self._first) if self._repeats is None else None

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
        UnsupportedError: no timesteps, or equal neighbours, which could not be told apart.
    """

    missed_run = False

    def __init__(self, timesteps: Sequence[float] | torch.Tensor) -> None:
        self._values = [float(value) for value in timesteps]
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


def _noise_levels(sigmas: torch.Tensor) -> list[float]:
    """Sigmas of a flow as they are; those of other models, noise over picture, as angles."""
    levels = [float(sigma) for sigma in sigmas]
    return levels if max(map(abs, levels)) <= FLOW_SIGMA_MAX else [math.atan(sigma) for sigma in levels]


def _flow_moves(scheduler: Any, first: int) -> Moves | None:
    """How far a flow's outputs move the latents; Euler's steps are known without a trial."""
    sigmas = getattr(scheduler, "sigmas", None)
    # Beyond a flow's sigmas the pipeline may make the velocity of something else that the transformer gives (Cosmos).
    if sigmas is None or float(sigmas.max()) > FLOW_SIGMA_MAX:
        return None
    if any(cls.__name__ == EULER for cls in type(scheduler).__mro__) and not scheduler.config.stochastic_sampling:
        return euler_moves(sigmas.tolist()[first:])
    return linear_moves(scheduler, first)


def _largest(timestep: torch.Tensor | float) -> float:
    """A timestep per token (Wan's ``expand_timesteps``) counts by its maximum."""
    return float(timestep.max()) if isinstance(timestep, torch.Tensor) else float(timestep)
