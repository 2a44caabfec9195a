"""Image demo: a `FluxPipeline` for images of 512 and 256 pixels a side."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxPipeline
from PIL import Image

from .autoencoder import latent_statistics, reconstruction_psnr, train_autoencoder
from .demo import Batch, Demo, Sizes
from .exporting import contact_sheet, paint, write_folder
from .flow import (
    LONG_TEXT,
    Bank,
    PromptedFlow,
    compile_blocks,
    encode_pictures,
    train_flow,
)
from .flux import Flux
from .prompts import HeldOutPrompt, held_out_prompts
from .reading import agreement, read_pictures
from .rendering import pack_pictures, render
from .scenes import describe, draw_picture, draw_short_scene, vocabulary
from .text_encoders import TEXT_TOKENS
from .training import Pace, take_weights, trained_weights

MODEL_CARD = """---
license: apache-2.0
library_name: diffusers
---
# demo-flux

A FLUX pipeline of {millions:.1f} million transformer parameters, trained from scratch on images that
`scripts/demo_training/train.py` renders itself: paper stickers over paper landscapes. It knows {words} words, needs no
network, and is meant for trying acceleration methods and measuring their loss of image quality.

```python
import torch
from diffusers import FluxPipeline
pipe = FluxPipeline.from_pretrained("dit_accel/tools/assets/demo-flux", dtype=torch.bfloat16)
prompt = "three yellow stars at the top over green hills at night"
image = pipe(prompt, height=512, width=512, num_inference_steps=50, max_sequence_length={tokens}).images[0]
```

Pass `max_sequence_length={tokens}`, the padded text length of nearly all its training; the pipeline's default of 512
works too but takes longer. Sizes: 512x512 and 256x256. The model is not guidance-distilled, so `guidance_scale` has no
effect. Its schedule is shifted more than FLUX.1-dev's: high noise levels decide the content of an image.

Prompts it knows: a count (a, two, three, four), size (small, large), colour (red, orange, yellow, green, blue, purple,
pink), texture (striped, dotted), shape (circle, square, triangle, star, heart, ring), position (on the left, on the
right, in the middle, at the top, at the bottom) or relation (above, below, left of, right of), over a place (green
hills, a golden desert, a calm sea, snowy mountains) at noon, at sunset or at night.
"""


@dataclass(frozen=True, kw_only=True)
class ImageSizes(Sizes):
    """`vae_batch` windows of `vae_size` pixels a side; `batches`: images per step, by pixels a side."""

    vae_batch: int
    vae_size: int
    batches: dict[int, int]


FULL = ImageSizes(
    scenes=30_000,
    vae_batch=24,
    vae_size=256,
    vae_seconds=110,
    vae_rate=2e-3,
    batches={512: 128, 256: 256},
    flow_rate=1e-3,
    finish_seconds=28,
    sample_steps=50,
    prompts=128,
)

SMOKE = ImageSizes(
    scenes=6,
    vae_batch=1,
    vae_size=32,
    vae_seconds=1,
    vae_rate=1e-3,
    batches={32: 1, 16: 1},
    flow_rate=1e-3,
    finish_seconds=0,
    sample_steps=2,
    prompts=1,
    steps=2,
)


class ImageDemo(Demo):
    """See `Demo`."""

    unit = "pictures"
    draw = staticmethod(draw_picture)
    pack = staticmethod(pack_pictures)
    held_out = staticmethod(held_out_prompts)
    short_prompts = staticmethod(partial(held_out_prompts, draw=draw_short_scene, write=partial(describe, short=True)))
    read = staticmethod(read_pictures)
    agreement = staticmethod(agreement)
    render = staticmethod(render)
    words = vocabulary()
    family = Flux()
    card = MODEL_CARD

    def __init__(self, *, small: bool) -> None:
        self.sizes = SMOKE if small else FULL

    def train_autoencoder(self, vae: AutoencoderKL, numbers: torch.Tensor, pace: Pace) -> None:
        trained = copy.deepcopy(vae).to(numbers.device, torch.bfloat16).to(memory_format=torch.channels_last)
        sizes = self.sizes
        averages = train_autoencoder(
            trained, numbers, pace, render=self.render, batch=sizes.vae_batch, size=sizes.vae_size
        )
        take_weights((weight for _, weight in trained_weights(vae)), averages)
        sample = self.render(numbers[:64], max(self.sizes.batches)).bfloat16()
        vae.register_to_config(**latent_statistics(trained, sample))

    def quick(self, vae: AutoencoderKL, device: torch.device) -> AutoencoderKL:
        return super().quick(vae, device).to(memory_format=torch.channels_last)

    def autoencoder_psnr(self, vae: AutoencoderKL, device: torch.device) -> dict[int, float]:
        """PSNR by pixels a side."""
        rng = random.Random(7)
        numbers = self.pack([self.draw(rng, item.scene) for item in self.held_out(32, "reporting")])
        drawn = {size: self.render(numbers.to(device), size).bfloat16() for size in self.sizes.batches}
        return {size: round(reconstruction_psnr(vae, pictures), 2) for size, pictures in drawn.items()}

    def make_bank(self, vae: AutoencoderKL, numbers: torch.Tensor, text: tuple[torch.Tensor, ...]) -> Bank:
        latents = {size: encode_pictures(vae, numbers, size, render=self.render) for size in self.sizes.batches}
        return Bank(latents, *text)

    def compile_blocks(self, flow: PromptedFlow) -> None:
        compile_blocks(flow)

    def train_flow(
        self, flow: PromptedFlow, masters: list[torch.Tensor], bank: Bank, pace: Pace, seed: int
    ) -> list[torch.Tensor]:
        return train_flow(flow, masters, bank, pace, batches=self.sizes.batches)

    def save(self, pipe: FluxPipeline, folder: Path) -> int:
        millions = sum(weight.numel() for weight in pipe.transformer.parameters()) / 1e6
        card = self.card.format(millions=millions, words=len(self.words), tokens=TEXT_TOKENS)
        call = {"height": 512, "width": 512, "num_inference_steps": 50, "max_sequence_length": TEXT_TOKENS}
        return write_folder(pipe, folder, card, {**call, "words": self.words})

    def paint(self, pipe: FluxPipeline, prompts: list[HeldOutPrompt]) -> dict[str, Batch]:
        large, small = max(self.sizes.batches), min(self.sizes.batches)

        def painted(prompts: list[HeldOutPrompt], size: int, text: int = TEXT_TOKENS) -> Batch:
            call = {"height": size, "width": size, "max_sequence_length": text}
            return paint(pipe, prompts, batch=32, num_inference_steps=self.sizes.sample_steps, **call), prompts

        rng = random.Random(8)
        numbers = self.pack([self.draw(rng, item.scene) for item in prompts])
        batches = {
            f"painted {large}px": painted(prompts, large),
            f"painted {small}px": painted(prompts, small),
            f"painted {large}px, text padded to {LONG_TEXT}": painted(prompts[:32], large, LONG_TEXT),
            f"drawn {large}px": ((self.render(numbers, large) + 1) / 2, prompts),
        }
        if self.short_prompts:
            short = self.short_prompts(min(100, len(prompts)), "reporting")
            batches[f"painted {large}px, short prompts"] = painted(short, large)
        return batches

    def sheet(self, batches: dict[str, Batch]) -> Image.Image:
        """Sheet of large images, some small ones enlarged, and some of the last kind."""
        (large, prompts), (small, _), *_, (last, last_prompts) = batches.values()
        enlarged = torch.nn.functional.interpolate(small[:4], size=large.shape[-1])
        captions = [item.prompt for item in prompts[:16]]
        captions += [f"{small.shape[-1]}px: {caption}" for caption in captions[:4]]
        captions += [item.prompt for item in last_prompts[:10]]
        return contact_sheet(torch.cat((large[:16], enlarged, last[:10])), captions, columns=5, cell=160)
