"""Evaluate a demo pipeline against the dense one, on prompts, images and videos never seen in training."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline

from dit_accel.tools.measure.metrics import psnr
from scripts.demo_training.prompts import HeldOutPrompt

from .calls import CallRecorder, Calls, velocity_error
from .subjects import AT_ONCE, Subject

SHARE = 0.05  # of the dense pipeline's calls, for comparing velocities


@dataclass(frozen=True)
class HeldOut:
    """Data for evaluating pipelines; `dense` are the dense pipeline's outputs, uint8 [N, 3, F, H, W].

    `teacher`: some of its calls for these. `drawn`: calls for flow matching on renderings of the same scenes, or None.
    """

    subject: Subject
    prompts: list[HeldOutPrompt]
    dense: torch.Tensor
    teacher: Calls
    drawn: Calls | None


def hold_out(subject: Subject, pipe: DiffusionPipeline, count: int, call: dict[str, Any]) -> HeldOut:
    """Sample, record and render the first `count` prompts of the reporting list."""
    prompts = subject.held_out(count)
    with CallRecorder(pipe.transformer, SHARE) as recorder:
        dense = paint(subject, pipe, prompts, call)
    return HeldOut(subject, prompts, dense, recorder.calls(), subject.drawn_calls(pipe, prompts, call))


def paint(
    subject: Subject, pipe: DiffusionPipeline, prompts: list[HeldOutPrompt], call: dict[str, Any]
) -> torch.Tensor:
    """Sample prompts with the pipeline, uint8 [N, 3, F, H, W] on the CPU."""
    painted = subject.paint(pipe, prompts, call)
    if not painted.isfinite().all():
        raise FloatingPointError("the pipeline returns values that are not finite")
    return (painted * 255).round().to(torch.uint8)


@torch.no_grad()
def judge(pipe: DiffusionPipeline, painted: torch.Tensor, held_out: HeldOut) -> dict[str, Any]:
    """Return quality figures of a pipeline and `painted`, its outputs for the held-out prompts, uint8 [N, 3, F, H, W].

    `psnr_db`: against the dense pipeline's outputs from the same noise; None for the dense pipeline. `velocity_mse`:
    against the dense velocities, on the dense pipeline's latents. `flow_loss`: on rendered scenes at random noise
    levels; None without rendered scenes. `agreement`: share of the prompts' attributes that can be read in the outputs.
    """
    pairs = zip(painted.transpose(1, 2), held_out.dense.transpose(1, 2), strict=True)
    decibels = None if painted is held_out.dense else [psnr(ours, dense) for ours, dense in pairs]
    drawn = held_out.drawn
    return {
        "psnr_db": decibels and statistics.fmean(decibels),
        "psnr_db_each": decibels,
        "velocity_mse": mean_error(pipe, held_out.teacher),
        "flow_loss": None if drawn is None else mean_error(pipe, drawn),
        "agreement": held_out.subject.agreement(painted.to(pipe.device) / 255, held_out.prompts),
    }


def mean_error(pipe: DiffusionPipeline, calls: Calls, rounds: int = 8) -> float:
    """Mean `velocity_error` over all calls, with the same `rounds` noise levels per clean latent for all pipelines."""
    calls = calls.to(pipe.device, pipe.transformer.dtype)
    generator = torch.Generator(pipe.device).manual_seed(0)
    total = 0.0
    for _ in range(rounds if calls.velocity is None else 1):
        for start in range(0, len(calls), AT_ONCE):
            part = calls.rows(slice(start, start + AT_ONCE))
            total += float(velocity_error(pipe.transformer, part, generator)) * len(part)
    return total / len(calls) / (rounds if calls.velocity is None else 1)
