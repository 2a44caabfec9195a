"""What a demo video pipeline is worth beside the dense one, on prompts and clips that no training sees."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo_models import clips
from demo_models.clip_reading import agreement, read_clips
from demo_models.prompts import HeldOutPrompt
from demo_models.video_exporting import paint_clips
from demo_models.video_family import VideoFamily
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from dit_accel.tools.metrics import psnr

from .calls import CallRecorder, Calls, clip_calls, velocity_error

AT_ONCE = 32  # clips or calls
SHARE = 0.05  # of the dense pipeline's calls, on which velocities are compared


@dataclass(frozen=True)
class HeldOut:
    """What pipelines are judged on.

    Args:
        prompts: with the seed of each.
        dense: the dense pipeline's clips of them, uint8 [N, 3, F, H, W].
        teacher: some of its calls as it painted them.
        drawn: calls for flow matching on clips drawn of the same scenes.
    """

    prompts: list[HeldOutPrompt]
    dense: torch.Tensor
    teacher: Calls
    drawn: Calls

    def save(self, folder: Path) -> None:
        save_file({"clips": self.dense}, folder / "dense.safetensors")
        self.teacher.save(folder / "held-out-calls.safetensors")
        self.drawn.save(folder / "drawn-calls.safetensors")

    @classmethod
    def load(cls, folder: Path) -> HeldOut:
        dense = load_file(folder / "dense.safetensors")["clips"]
        calls = (Calls.load(folder / f"{name}-calls.safetensors") for name in ("held-out", "drawn"))
        return cls(clips.held_out_prompts(len(dense), "reporting"), dense, *calls)


def hold_out(family: VideoFamily, pipe: DiffusionPipeline, count: int, call: dict[str, Any]) -> HeldOut:
    """Paint, record and draw for the first `count` prompts of the reporting list.

    Args:
        call: arguments of the pipeline's call, without prompt and generator.
    """
    prompts = clips.held_out_prompts(count, "reporting")
    with CallRecorder(pipe.transformer, SHARE) as recorder:
        dense = paint(family, pipe, prompts, call)
    rng = random.Random(7)
    numbers = clips.pack([clips.draw_clip(rng, item.scene) for item in prompts])
    drawn = clip_calls(family, pipe, [item.prompt for item in prompts], numbers, call)
    return HeldOut(prompts, dense, recorder.calls(), drawn)


def paint(
    family: VideoFamily, pipe: DiffusionPipeline, prompts: list[HeldOutPrompt], call: dict[str, Any]
) -> torch.Tensor:
    """The pipeline's clips, uint8 [N, 3, F, H, W] on the CPU."""
    shape = {"frames": call["num_frames"], "size": call["height"], "steps": call["num_inference_steps"]}
    painted = paint_clips(family, pipe, prompts, **shape, batch=AT_ONCE)
    if not painted.isfinite().all():
        raise FloatingPointError("the pipeline paints values that are not finite")
    return (painted * 255).round().to(torch.uint8)


@torch.no_grad()
def judge(pipe: DiffusionPipeline, painted: torch.Tensor, held_out: HeldOut) -> dict[str, Any]:
    """Figures of a pipeline and its clips.

    ``psnr_db``: of the clips against the dense pipeline's from the same noise, None where they are these.
    ``velocity_mse``: of its velocities against the dense ones, on the dense pipeline's latents. ``flow_loss``: on drawn
    clips at random noise levels. ``agreement``: fraction of clips in which what the prompt says can be read.

    Args:
        pipe: as it painted.
        painted: its clips of the held-out prompts, uint8 [N, 3, F, H, W].
    """
    pairs = zip(painted.transpose(1, 2), held_out.dense.transpose(1, 2), strict=True)
    decibels = None if painted is held_out.dense else [psnr(ours, dense) for ours, dense in pairs]
    scenes = [item.scene for item in held_out.prompts]
    return {
        "psnr_db": decibels and statistics.fmean(decibels),
        "psnr_db_each": decibels,
        "velocity_mse": mean_error(pipe, held_out.teacher),
        "flow_loss": mean_error(pipe, held_out.drawn),
        "agreement": agreement(read_clips(painted.to(pipe.device) / 255), scenes),
    }


def mean_error(pipe: DiffusionPipeline, calls: Calls, rounds: int = 8) -> float:
    """`velocity_error` over all calls, of clean latents at `rounds` noise levels each, the same for all pipelines."""
    calls = calls.to(pipe.device, pipe.transformer.dtype)
    generator = torch.Generator(pipe.device).manual_seed(0)
    total = 0.0
    for _ in range(rounds if calls.velocity is None else 1):
        for start in range(0, len(calls), AT_ONCE):
            part = calls.rows(slice(start, start + AT_ONCE))
            total += float(velocity_error(pipe.transformer, part, generator)) * len(part)
    return total / len(calls) / (rounds if calls.velocity is None else 1)
