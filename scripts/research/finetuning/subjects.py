"""Training and evaluation data of demo models: videos of the video models, images of the image model."""

import random
from typing import Any

import torch
from diffusers import DiffusionPipeline

from scripts.demo_training import clip_reading, clips, prompts, reading, rendering, scenes
from scripts.demo_training.exporting import paint
from scripts.demo_training.family import Shape, VideoFamily
from scripts.demo_training.flux import Flux
from scripts.demo_training.hunyuan import Hunyuan
from scripts.demo_training.prompts import HeldOutPrompt
from scripts.demo_training.training import draw_bank
from scripts.demo_training.wan import Wan

from .calls import Calls, clip_calls

AT_ONCE = 32  # images or videos


class Clips:
    """Scenes of a demo video model; `variants` are compared with SLA by default."""

    variants = ("linear", "sparse-90", "sum-90", "sla-90", "sparse-95", "sum-95", "sla-95")

    def __init__(self, family: VideoFamily) -> None:
        self.family = family

    def draw(self, count: int, seed: int) -> tuple[list[str], torch.Tensor]:
        """Prompts of training scenes, and the packed numbers of their renderings, ``[N, K]``."""
        return draw_bank(clips.draw_clip, clips.pack, count, seed, parallel=False)

    def held_out(self, count: int) -> list[HeldOutPrompt]:
        return clips.held_out_prompts(count, "reporting")

    def paint(self, pipe: DiffusionPipeline, held_out: list[HeldOutPrompt], call: dict[str, Any]) -> torch.Tensor:
        """Sample prompts with the arguments of a call, each with its seed: ``[N, 3, F, H, W]`` in 0..1 on the CPU."""
        shape = Shape(call["num_frames"], call["height"])
        return self.family.paint(pipe, held_out, shape, steps=call["num_inference_steps"], batch=AT_ONCE)

    def agreement(self, painted: torch.Tensor, held_out: list[HeldOutPrompt]) -> dict[str, float]:
        """Share of the prompts' attributes that can be read, by attribute, in ``[N, 3, F, H, W]`` in 0..1."""
        return clip_reading.agreement(clip_reading.read_clips(painted), [item.scene for item in held_out])

    def drawn_calls(self, pipe: DiffusionPipeline, held_out: list[HeldOutPrompt], call: dict[str, Any]) -> Calls | None:
        """Calls for flow matching on renderings of the prompts' scenes; None if not available."""
        rng = random.Random(7)
        numbers = clips.pack([clips.draw_clip(rng, item.scene) for item in held_out])
        return clip_calls(self.family, pipe, [item.prompt for item in held_out], numbers, call)


class Pictures:
    """Scenes of the demo image model, as of `Clips`; an image counts as a video with one frame."""

    variants = ("sparse-87", "sum-87", "sla-87")
    family = Flux()

    def draw(self, count: int, seed: int) -> tuple[list[str], torch.Tensor]:
        return draw_bank(scenes.draw_picture, rendering.pack_pictures, count, seed, parallel=False)

    def held_out(self, count: int) -> list[HeldOutPrompt]:
        return prompts.held_out_prompts(count, "reporting")

    def paint(self, pipe: DiffusionPipeline, held_out: list[HeldOutPrompt], call: dict[str, Any]) -> torch.Tensor:
        return paint(pipe, held_out, batch=AT_ONCE, **call)[:, :, None]

    def agreement(self, painted: torch.Tensor, held_out: list[HeldOutPrompt]) -> dict[str, float]:
        return reading.agreement(reading.read_pictures(painted[:, :, 0]), [item.scene for item in held_out])

    def drawn_calls(self, pipe: DiffusionPipeline, held_out: list[HeldOutPrompt], call: dict[str, Any]) -> None:
        return None


Subject = Clips | Pictures
SUBJECTS: dict[str, Subject] = {"demo-wan": Clips(Wan()), "demo-hunyuan": Clips(Hunyuan()), "demo-flux": Pictures()}
