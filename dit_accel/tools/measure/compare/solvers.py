"""Fewer steps, with the model's own solver or a higher-order solver on its noise levels."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import diffusers
import numpy as np
import torch

from dit_accel.tools.measure.compare.methods import Peer, Subject

SHARES = (0.16, 0.2, 0.26, 0.3, 0.36, 0.4, 0.5, 0.6)  # of the plain run's steps


class _FlowSchedule:
    """Mixin for a solver of diffusers: takes noise levels and timesteps from the pipeline's own scheduler, unrounded.

    If a pipeline does not set the levels (Wan), Euler's default ends in a step too large for higher orders. Then the
    levels are even before the shift, as in the FLUX and HunyuanVideo pipelines and as these solvers choose themselves.
    """

    base: Any

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None, mu: float | None = None
    ) -> None:
        if sigmas is None:
            sigmas = np.linspace(1.0, 0.0, num_inference_steps + 1)[:-1]
        self.base.set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu)
        super().set_timesteps(len(self.base.timesteps), device=device)
        self.timesteps = self.base.timesteps.clone()
        self.sigmas = self.base.sigmas.cpu().clamp(max=1 - 1e-6)  # at sigma 1 the logarithm of the signal is −∞

    def _sigma_to_alpha_sigma_t(self, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 1 - sigma, sigma


class _DPM(_FlowSchedule, diffusers.DPMSolverMultistepScheduler): ...


class _UniPC(_FlowSchedule, diffusers.UniPCMultistepScheduler): ...


SOLVERS = {"DPM++ 2M": _DPM, "UniPC": _UniPC}
SHIFT = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")


def solver_over(base: Any, solver: str) -> Any:
    """Make one of `SOLVERS` that uses the noise levels and timesteps of a flow model's scheduler ``base``."""
    scheduler = SOLVERS[solver](num_train_timesteps=base.config.num_train_timesteps, prediction_type="flow_prediction")
    scheduler.base = base
    shift = {key: base.config[key] for key in SHIFT if key in base.config}
    scheduler.register_to_config(**shift)  # pipelines read the shift of the noise levels from it
    return scheduler


@contextmanager
def _fewer(subject: Subject, count: int, solver: str | None = None) -> Iterator[dict[str, Any]]:
    base = subject.pipe.scheduler
    if solver is not None:
        subject.pipe.scheduler = solver_over(base, solver)
    try:
        yield {"num_inference_steps": count}
    finally:
        subject.pipe.scheduler = base


def _counts(steps: int) -> list[tuple[int]]:
    return [(count,) for count in sorted({max(2, round(share * steps)) for share in SHARES} - {steps})]


def _solver(solver: str) -> Peer:
    """Return settings with a solver of higher order, also with all steps, whose output differs from the plain one."""

    def why_not(pipe: Any) -> str | None:
        name = type(pipe.scheduler).__name__
        return None if name == "FlowMatchEulerDiscreteScheduler" else f"{name} is not FlowMatchEulerDiscreteScheduler"

    series, put_on = f"fewer steps, {solver}", partial(_fewer, solver=solver)
    return Peer(series, f"{solver} {{}} steps", lambda steps: [*_counts(steps), (steps,)], put_on, why_not)


FEWER_STEPS = {"fewer-steps": Peer("fewer steps", "{} steps", _counts, _fewer)}
FEWER_STEPS |= {"fewer-steps-dpm": _solver("DPM++ 2M"), "fewer-steps-unipc": _solver("UniPC")}
