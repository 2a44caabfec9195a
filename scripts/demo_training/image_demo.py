"""Image demo: a `FluxPipeline` for images of 512 and 256 pixels a side."""

import copy
import itertools
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from PIL import Image

from .autoencoder import Losses, mean_psnr, reconstruct, train_autoencoder, windows
from .exporting import Batch, contact_sheet, paint, write_folder
from .family import Texts
from .flow import Bank, Turn
from .flux import LONG_TEXT, Flux
from .prompts import HeldOutPrompt, held_out_prompts
from .reading import agreement, read_pictures
from .rendering import pack_pictures, render
from .scenes import describe, draw_picture, draw_short_scene, vocabulary
from .text_encoders import TEXT_TOKENS
from .training import Pace, Sizes, take_weights, trained_weights

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


FULL = Sizes(
    scenes=30_000,
    vae_seconds=110,
    vae_rate=2e-3,
    vae_batches={256: 24},
    batches={512: 128, 256: 256},
    finish_seconds=28,
    prompts=128,
)
SMOKE = Sizes(
    scenes=6,
    vae_seconds=1,
    vae_rate=1e-3,
    vae_batches={32: 1},
    batches={32: 1, 16: 1},
    finish_seconds=0,
    prompts=1,
    sample_steps=2,
    steps=2,
)
SQUARE_WEIGHT = 2.0  # of the autoencoder's loss
LONG_TEXT_EVERY = 16  # steps


class ImageDemo:
    """A demo model: its family, its sizes, and functions that generate, learn, sample and read scenes.

    A scene is an image or a video; scenes are packed numbers [N, K] on the training device. The functions above the
    constructor: `draw(rng)` and `draw(rng, scene)` return an object with a `.prompt` and a `.scene`, `pack` the numbers
    of a list of these, `held_out(count, split)` prompts, `read` readings of a batch in 0..1, which `agreement` compares
    with scenes.
    """

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
        """Train a float32 autoencoder on the CPU, and set its latents' statistics."""
        trained = copy.deepcopy(vae).to(numbers.device, torch.bfloat16).to(memory_format=torch.channels_last)
        masters = [weight.detach().float() for _, weight in trained_weights(trained)]
        ((size, batch),) = self.sizes.vae_batches.items()
        generator = torch.Generator(numbers.device).manual_seed(1)
        drawn = windows(partial(self._drawn, size=size), numbers, batch, (1.0, 0.5), generator)
        stage = Losses(trained, trained.encoder, trained.decoder, axes=2), drawn
        averages = train_autoencoder(trained, masters, pace, [stage], SQUARE_WEIGHT)
        take_weights((weight for _, weight in trained_weights(vae)), averages)
        with torch.no_grad():
            sample = self.render(numbers[:64], max(self.sizes.batches)).bfloat16()
            latents = trained.encode(sample).latent_dist.mode().float()
        vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std()))

    def quick(self, vae: AutoencoderKL, device: torch.device) -> AutoencoderKL:
        """Return the autoencoder in bf16, for use alone; may be `vae` itself."""
        return vae.to(device, torch.bfloat16).requires_grad_(False).eval().to(memory_format=torch.channels_last)

    def autoencoder_psnr(self, vae: AutoencoderKL, device: torch.device) -> dict[int, float]:
        """PSNR in dB on held-out scenes, by pixels a side."""
        rng = random.Random(7)
        numbers = self.pack([self.draw(rng, item.scene) for item in self.held_out(32, "reporting")])
        drawn = {size: self.render(numbers.to(device), size).bfloat16() for size in self.sizes.batches}
        return {size: mean_psnr(pictures, reconstruct(vae, pictures)) for size, pictures in drawn.items()}

    @torch.no_grad()
    def make_bank(self, vae: AutoencoderKL, numbers: torch.Tensor, text: Texts) -> Bank:
        """Encode all images at each size to normalised, packed latents, [N, (size / 16)^2, 64]."""
        shift, scale = vae.config.shift_factor, vae.config.scaling_factor
        bank = {}
        for size in self.sizes.batches:
            packed = []
            for chunk in numbers.split(128):
                latents = (vae.encode(self._drawn(chunk, size)).latent_dist.mode() - shift) * scale
                packed.append(FluxPipeline._pack_latents(latents.contiguous(), *latents.shape))
            bank[size] = torch.cat(packed)
        return Bank(bank, text)

    def _drawn(self, numbers: torch.Tensor, size: int, **window: Any) -> torch.Tensor:
        return self.render(numbers, size, **window).bfloat16().contiguous(memory_format=torch.channels_last)

    def flow_seed(self, seed: int) -> int:
        """Return the seed of the flow's random numbers."""
        return 2

    def turns(self) -> Iterator[Turn]:
        """Turns of `train_flow`: three of four steps have the largest size."""
        batches = self.sizes.batches
        for step in itertools.count(1):
            long_text = step % LONG_TEXT_EVERY == 0
            smaller = step % 4 == 2 or (long_text and step // LONG_TEXT_EVERY % 2 == 0)
            size = min(batches) if smaller else max(batches)
            batch = max(1, batches[size] // 4) if long_text else batches[size]
            yield size, batch, long_text, f"{size}px" + " long" * long_text

    def save(self, pipe: FluxPipeline, folder: Path) -> int:
        """Write the pipeline, its card and the arguments of a call; return the folder's size in bytes."""
        millions = sum(weight.numel() for weight in pipe.transformer.parameters()) / 1e6
        card = self.card.format(millions=millions, words=len(self.words), tokens=TEXT_TOKENS)
        call = {"height": 512, "width": 512, "num_inference_steps": 50, "max_sequence_length": TEXT_TOKENS}
        return write_folder(pipe, folder, card, {**call, "words": self.words})

    def paint(self, pipe: FluxPipeline, prompts: list[HeldOutPrompt]) -> dict[str, Batch]:
        """Return batches by their description: first sampled, then rendered."""
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
