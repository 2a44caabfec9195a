"""The demos of clips: a `WanPipeline` and a `HunyuanVideoPipeline`, 17 frames of 256 pixels a side."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

from . import clips
from .clip_prompts import vocabulary
from .clip_reading import agreement, read_clips
from .demo import Demo, Sizes
from .exporting import contact_sheet
from .prompts import HeldOutPrompt
from .training import Pace, take_weights
from .video_exporting import paint_clips, save_pipeline
from .video_family import GUIDANCE, VideoFamily
from .video_flow import Bank, backward_once, compile_blocks, train_flow
from .video_vae import encode_clips, latent_statistics, mean_psnr, reconstruct, train_autoencoder


@dataclass(frozen=True, kw_only=True)
class VideoSizes(Sizes):
    """`frames` of `size` pixels a side; `vae_batches` are clips a step, by pixels a side."""

    frames: int
    size: int
    vae_batches: dict[int, int]
    bank_seconds: float
    bank_batch: int
    flow_batch: int


FULL = VideoSizes(
    scenes=20_000,
    frames=17,
    size=256,
    vae_batches={64: 16, 128: 4, 256: 2},
    vae_seconds=230,
    vae_rate=2e-3,
    bank_seconds=60,
    bank_batch=16,
    flow_batch=128,
    flow_rate=1e-3,
    finish_seconds=50,
    sample_steps=50,
    prompts=64,
)

SMOKE = VideoSizes(
    scenes=6,
    frames=5,
    size=32,
    vae_batches={16: 1, 32: 1},
    vae_seconds=1,
    vae_rate=1e-3,
    bank_seconds=1,
    bank_batch=2,
    flow_batch=2,
    flow_rate=1e-3,
    finish_seconds=0,
    sample_steps=2,
    prompts=1,
    steps=2,
)


class VideoDemo(Demo):
    """See `Demo`."""

    unit = "clips"
    draw = staticmethod(clips.draw_clip)
    pack = staticmethod(clips.pack)
    held_out = staticmethod(clips.held_out_prompts)
    read = staticmethod(read_clips)
    agreement = staticmethod(agreement)

    def __init__(self, family: VideoFamily, *, small: bool) -> None:
        self.family, self.words = family, vocabulary()
        self.sizes = SMOKE if small else FULL
        self.shape = {"frames": self.sizes.frames, "size": self.sizes.size}

    def train_autoencoder(self, vae: nn.Module, numbers: torch.Tensor, pace: Pace) -> None:
        sizes = self.sizes
        trained = copy.deepcopy(vae).to(numbers.device, torch.bfloat16)
        masters = [weight.detach().clone().to(numbers.device) for weight in vae.parameters()]
        batches = {"batches": sizes.vae_batches, "frames": sizes.frames}
        take_weights(vae.parameters(), train_autoencoder(self.family, trained, masters, numbers, pace, **batches))
        sample = clips.render_clips(numbers[:64], **self.shape).bfloat16()
        mean, deviation = latent_statistics(self.family, trained, sample)
        self.family.set_statistics(vae, mean.cpu(), deviation.cpu())

    def autoencoder_psnr(self, vae: nn.Module, device: torch.device) -> float:
        return mean_psnr(*self._reconstructions(vae, device))

    def make_bank(self, vae: nn.Module, numbers: torch.Tensor, text: tuple[torch.Tensor, ...]) -> Bank:
        """As many clips as can be encoded in its time."""
        pace = Pace("bank", self.sizes.bank_seconds, 1.0, most_steps=self.sizes.steps)
        return Bank(encode_clips(self.family, vae, numbers, pace, **self.shape, batch=self.sizes.bank_batch), text)

    def compile_blocks(self, flow: nn.Module) -> None:
        compile_blocks(flow)

    def backward_at_every_shape(self, flow: nn.Module, text: tuple[torch.Tensor, ...], device: torch.device) -> None:
        backward_once(self.family, flow, text, device, **self.shape, batch=self.sizes.flow_batch)

    def train_flow(
        self, flow: nn.Module, masters: list[torch.Tensor], bank: Bank, pace: Pace, seed: int
    ) -> list[torch.Tensor]:
        return train_flow(self.family, flow, masters, bank, pace, batch=self.sizes.flow_batch, seed=seed)

    def save(self, pipe: DiffusionPipeline, folder: Path) -> int:
        steps = self.sizes.sample_steps
        return save_pipeline(self.family, pipe, folder, **self.shape, steps=steps, words=len(self.words))

    def paint(self, pipe: DiffusionPipeline, prompts: list[HeldOutPrompt]) -> dict[str, torch.Tensor]:
        shape = {**self.shape, "steps": self.sizes.sample_steps}
        painted = paint_clips(self.family, pipe, prompts, **shape)
        drawn, decoded = self._reconstructions(pipe.vae, pipe.device)
        return {
            f"painted, guidance {GUIDANCE}": painted,
            "drawn": (drawn + 1) / 2,
            "drawn, through the autoencoder": (decoded + 1) / 2,
            **{
                f"painted, guidance {guidance}": paint_clips(
                    self.family, pipe, prompts[: len(drawn)], **shape, guidance=guidance
                )
                for guidance in (1.0, 5.0)
            },
        }

    def sheet(self, batches: dict[str, torch.Tensor], captions: list[str]) -> Image.Image:
        painted, *_ = batches.values()
        return contact_sheet(clips.film_strips(painted[:16]), captions[:16], columns=2, cell=720)

    def _reconstructions(self, vae: nn.Module, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips drawn of held-out scenes in -1..1, and what the autoencoder makes of them."""
        rng = random.Random(7)
        held_out = clips.held_out_prompts(min(32, self.sizes.prompts), "reporting")
        numbers = clips.pack([clips.draw_clip(rng, item.scene) for item in held_out]).to(device)
        drawn = clips.render_clips(numbers, **self.shape)
        return drawn, reconstruct(vae, drawn)
