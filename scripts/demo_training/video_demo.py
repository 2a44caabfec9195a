"""Video demos: a `WanPipeline` and a `HunyuanVideoPipeline`, 17 frames of 256 pixels a side or more."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

from . import clips
from .clip_prompts import vocabulary
from .clip_reading import agreement, read_clips
from .demo import Batch, Demo, Sizes
from .exporting import contact_sheet
from .prompts import HeldOutPrompt
from .training import Pace, take_weights, trained_weights
from .video_exporting import paint_clips, save_pipeline
from .video_family import Shape, VideoFamily
from .video_flow import Bank, compile_blocks, train_flow
from .video_vae import encode_clips, latent_statistics, mean_psnr, reconstruct, train_autoencoder


@dataclass(frozen=True, kw_only=True)
class VideoSizes(Sizes):
    """`vae_batches`: videos per step by pixels a side; `batches`: the transformer's by shape, the demo's own first;
    `bank_seconds`: encoding time for each shape; `bank_tokens`: latent positions at a time."""

    vae_batches: dict[int, int]
    bank_seconds: float
    bank_tokens: int
    batches: dict[Shape, int]


FULL = VideoSizes(
    scenes=20_000,
    vae_batches={64: 16, 128: 4, 256: 2},
    vae_seconds=230,
    vae_rate=2e-3,
    bank_seconds=60,
    bank_tokens=16 * 5 * 32**2,
    batches={Shape(17, 256): 128},
    flow_rate=1e-3,
    finish_seconds=50,
    sample_steps=50,
    prompts=100,
)

SMOKE = VideoSizes(
    scenes=6,
    vae_batches={16: 1, 32: 1},
    vae_seconds=1,
    vae_rate=1e-3,
    bank_seconds=1,
    bank_tokens=64,
    batches={Shape(5, 32): 2, Shape(9, 48): 1},
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
        self.sizes = SMOKE if small else replace(FULL, batches=FULL.batches | family.longer)
        self.shape, *self.longer = self.sizes.batches

    def train_autoencoder(self, vae: nn.Module, numbers: torch.Tensor, pace: Pace) -> None:
        sizes = self.sizes
        weights = [weight for _, weight in trained_weights(vae)]
        trained = copy.deepcopy(vae).to(numbers.device, torch.bfloat16)
        masters = [weight.detach().clone().to(numbers.device) for weight in weights]
        batches = {"batches": sizes.vae_batches, "frames": self.shape.frames}
        take_weights(weights, train_autoencoder(self.family, trained, masters, numbers, pace, **batches))
        if not any(weight.requires_grad for weight in vae.encoder.parameters()):
            return  # the latents, and so their statistics, are as before
        sample = clips.render_clips(numbers[:64], **self.shape._asdict()).bfloat16()
        mean, deviation = latent_statistics(self.family, trained, sample)
        self.family.set_statistics(vae, mean.cpu(), deviation.cpu())

    def autoencoder_psnr(self, vae: nn.Module, device: torch.device) -> dict[str, float]:
        """By shape."""
        found = {}
        for shape, count in ((self.shape, 32), *((longer, 4) for longer in self.longer)):
            drawn = self._drawn(min(count, self.sizes.prompts), shape, device)
            found[f"{shape.frames} frames of {shape.size}px"] = mean_psnr(drawn, reconstruct(vae, drawn))
        return found

    def make_bank(self, vae: nn.Module, numbers: torch.Tensor, text: tuple[torch.Tensor, ...]) -> Bank:
        """Encode as many videos of each shape as its time allows."""
        latents = {}
        for shape in self.sizes.batches:
            pace = Pace("bank", self.sizes.bank_seconds, 1.0, most_steps=self.sizes.steps)
            batch = max(1, self.sizes.bank_tokens // ((shape.frames + 3) // 4 * (shape.size // 8) ** 2))
            latents[shape] = encode_clips(self.family, vae, numbers, pace, **shape._asdict(), batch=batch)
        return Bank(latents, text)

    def compile_blocks(self, flow: nn.Module) -> None:
        compile_blocks(flow)

    def train_flow(
        self, flow: nn.Module, masters: list[torch.Tensor], bank: Bank, pace: Pace, seed: int
    ) -> list[torch.Tensor]:
        return train_flow(self.family, flow, masters, bank, pace, batches=self.sizes.batches, seed=seed)

    def save(self, pipe: DiffusionPipeline, folder: Path) -> int:
        steps = self.sizes.sample_steps
        return save_pipeline(self.family, pipe, folder, self.shape, self.longer, steps=steps, words=self.words)

    def paint(self, pipe: DiffusionPipeline, prompts: list[HeldOutPrompt]) -> dict[str, Batch]:
        def painted(prompts: list[HeldOutPrompt], shape: Shape = self.shape, **options: Any) -> Batch:
            steps = self.sizes.sample_steps
            return paint_clips(self.family, pipe, prompts, **shape._asdict(), steps=steps, **options), prompts

        few = prompts[:32]
        usual = self.family.call[self.family.guidance_argument]
        drawn = self._drawn(len(few), self.shape, pipe.device)
        return {
            f"painted, guidance {usual}": painted(prompts),
            "drawn": ((drawn + 1) / 2, few),
            "drawn, through the autoencoder": ((reconstruct(pipe.vae, drawn) + 1) / 2, few),
            **{
                f"painted, guidance {guidance}": painted(few, guidance=guidance)
                for guidance in (1.0, 2.0, 3.0, 5.0)
                if guidance != usual
            },
            **{
                f"painted, {longer.frames} frames of {longer.size}px": painted(prompts[:16], longer, batch=8)
                for longer in self.longer
            },
        }

    def sheet(self, batches: dict[str, Batch]) -> Image.Image:
        """Make a sheet of film strips, including some of the last kind."""
        (painted, prompts), *_, (last, last_prompts) = batches.values()
        strips = [clips.film_strips(painted[:16]), clips.film_strips(last[:4])]
        strips[1] = F.interpolate(strips[1], size=strips[0].shape[-2:], mode="area")
        captions = [item.prompt for item in (*prompts[:16], *last_prompts[:4])]
        return contact_sheet(torch.cat(strips), captions, columns=2, cell=720)

    def _drawn(self, count: int, shape: Shape, device: torch.device) -> torch.Tensor:
        """Render videos of held-out scenes, in -1..1."""
        rng = random.Random(7)
        held_out = clips.held_out_prompts(count, "reporting")
        numbers = clips.pack([clips.draw_clip(rng, item.scene) for item in held_out]).to(device)
        return clips.render_clips(numbers, **shape._asdict())
