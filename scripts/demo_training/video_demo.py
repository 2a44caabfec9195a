"""Video demos: a `WanPipeline` and a `HunyuanVideoPipeline`, 17 frames of 256 pixels a side or more."""

import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

from . import clips
from .autoencoder import Losses, Stage, mean_psnr, reconstruct, train_autoencoder, windows
from .clip_prompts import vocabulary
from .clip_reading import agreement, read_clips
from .exporting import Batch, contact_sheet, write_folder
from .family import Shape, Texts, VideoFamily
from .flow import Bank, Turn
from .prompts import HeldOutPrompt
from .text_encoders import TEXT_TOKENS
from .training import Pace, Sizes, take_weights, trained_weights

FRAMES_PER_SECOND = 8
PRESET = "video-balanced"

MODEL_CARD = """---
license: apache-2.0
library_name: diffusers
---
# demo-{family}

A `{pipeline}` of {millions:.1f} million transformer parameters, trained from scratch on videos that
`scripts/demo_training/train.py` renders: paper stickers that move over paper landscapes. It knows {words} words and
needs no network. Its purpose is to try acceleration methods and to measure their loss of video quality.

```python
import torch
from diffusers import DiffusionPipeline

from dit_accel.tools.demo import demo_arguments, demo_path

folder = demo_path("demo-{family}")
pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
prompt = "a red circle moves up to the right over green hills, the camera pans left"
frames = pipe(prompt, **demo_arguments(folder)).frames[0]
```

`demo.json` holds the arguments that it was trained for: {frames} frames of {size}x{size} at {fps} frames per second,
text padded to {tokens} tokens{template}.{longer} Guidance is classifier-free{guidance}.

Prompts it knows: a circle (ball), square (box), triangle, star or heart in red, orange, yellow (golden), green, blue
or purple, which moves (to the left, up to the right, ...), bounces (from side to side, up and down), turns or rests;
or two of them, one above the other, which move to the left or right, bounce from side to side, turn or rest (a heart
that turns often breaks); over green hills, a golden desert, a calm sea or snowy mountains; the camera may pan left or
right.
"""
NOTES = {
    "wan": {"template": "", "guidance": ""},
    "hunyuan": {
        "template": ", and a prompt template of the prompt alone",
        "guidance": " (`true_cfg_scale`); the embedded `guidance_scale` has no effect",
    },
}

FULL = Sizes(
    scenes=20_000,
    vae_seconds=230,
    vae_rate=2e-3,
    vae_batches={64: 16, 128: 4, 256: 2},
    bank_seconds=60,
    bank_tokens=16 * 5 * 32**2,
    batches={Shape(17, 256): 128},
    finish_seconds=50,
    prompts=100,
)
SMOKE = Sizes(
    scenes=6,
    vae_seconds=1,
    vae_rate=1e-3,
    vae_batches={16: 1, 32: 1},
    bank_seconds=1,
    bank_tokens=64,
    batches={Shape(5, 32): 2, Shape(9, 48): 1},
    finish_seconds=0,
    prompts=1,
    sample_steps=2,
    steps=2,
)
SQUARE_WEIGHT = 10.0  # of the autoencoder's loss: most of the error is at edges that move, in one pixel of a hundred


class VideoDemo:
    """See `ImageDemo`."""

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
        weights = [weight for _, weight in trained_weights(vae)]
        trained = copy.deepcopy(vae).to(numbers.device, torch.bfloat16)
        masters = [weight.detach().clone().to(numbers.device) for weight in weights]
        with self.family.quick_training(trained):
            stages = self._stages(trained, numbers)
            take_weights(weights, train_autoencoder(trained, masters, pace, stages, SQUARE_WEIGHT))
        if not any(weight.requires_grad for weight in vae.encoder.parameters()):
            return  # the latents, and so their statistics, are as before
        sample = clips.render_clips(numbers[:64], **self.shape._asdict()).bfloat16()
        mean, deviation = latent_statistics(self.family, trained, sample)
        self.family.set_statistics(vae, mean.cpu(), deviation.cpu())

    def _stages(self, vae: nn.Module, numbers: torch.Tensor) -> list[Stage]:
        """Stages of the training: windows of whole videos and of half of them, small ones first, which are faster."""
        generator = torch.Generator(numbers.device).manual_seed(1)
        stages = []
        for size, batch in sorted(self.sizes.vae_batches.items()):
            extents = [min(1.0, part * size / max(self.sizes.vae_batches)) for part in (1, 2)]
            render = partial(self._rendered, frames=self.shape.frames, size=size)
            drawn = windows(render, numbers, batch, extents, generator)
            losses = Losses(vae, partial(self.family.encode, vae), partial(self.family.decode, vae), axes=3)
            sample = next(drawn)
            if sample.is_cuda:  # training is launch-bound
                losses = torch.cuda.make_graphed_callables(losses, (sample,), allow_unused_input=True)
            stages.append((losses, drawn))
        return stages

    def _rendered(self, numbers: torch.Tensor, **shape: Any) -> torch.Tensor:
        return clips.render_clips(numbers, **shape).bfloat16()

    def quick(self, vae: nn.Module, device: torch.device) -> nn.Module:
        return vae.to(device, torch.bfloat16).requires_grad_(False).eval()

    def autoencoder_psnr(self, vae: nn.Module, device: torch.device) -> dict[str, float]:
        """By shape."""
        found = {}
        for shape, count in ((self.shape, 32), *((longer, 4) for longer in self.longer)):
            drawn = self._drawn(min(count, self.sizes.prompts), shape, device)
            found[f"{shape.frames} frames of {shape.size}px"] = mean_psnr(drawn, reconstruct(vae, drawn))
        return found

    def make_bank(self, vae: nn.Module, numbers: torch.Tensor, text: Texts) -> Bank:
        """Encode as many videos of each shape as its time allows."""
        latents = {}
        for shape in self.sizes.batches:
            pace = Pace("bank", self.sizes.bank_seconds, 1.0, most_steps=self.sizes.steps)
            batch = max(1, self.sizes.bank_tokens // ((shape.frames + 3) // 4 * (shape.size // 8) ** 2))
            latents[shape] = encode_clips(self.family, vae, numbers, pace, shape, batch)
        return Bank(latents, text)

    def flow_seed(self, seed: int) -> int:
        return seed

    def turns(self) -> Iterator[Turn]:
        """Turns of `train_flow`: each step at a longer shape follows three at the first."""
        first = self.shape
        shapes = [shape for longer in self.longer for shape in (first, first, first, longer)] or [first]
        for step, shape in enumerate(itertools.cycle(shapes), start=1):
            every, batch = self.family.long_text_every, self.sizes.batches[shape]
            long_text = every is not None and step % every == 0
            name = f"loss {shape.frames} frames" + ", long text" * long_text
            yield shape, max(1, batch // 4) if long_text else batch, long_text, name

    def save(self, pipe: DiffusionPipeline, folder: Path) -> int:
        shape = self.shape
        card = MODEL_CARD.format(
            family=self.family.name,
            pipeline=type(pipe).__name__,
            millions=sum(weight.numel() for weight in pipe.transformer.parameters()) / 1e6,
            words=len(self.words),
            frames=shape.frames,
            size=shape.size,
            longer="".join(f" It makes {frames} frames of {size}x{size} too." for frames, size in self.longer),
            fps=FRAMES_PER_SECOND,
            tokens=TEXT_TOKENS,
            **NOTES[self.family.name],
        )
        call = {"height": shape.size, "width": shape.size, "num_frames": shape.frames}
        call |= {"num_inference_steps": self.sizes.sample_steps, **self.family.call}
        return write_folder(
            pipe, folder, card, call | {"fps": FRAMES_PER_SECOND, "preset": PRESET, "words": self.words}
        )

    def paint(self, pipe: DiffusionPipeline, prompts: list[HeldOutPrompt]) -> dict[str, Batch]:
        def painted(prompts: list[HeldOutPrompt], shape: Shape = self.shape, **options: Any) -> Batch:
            return self.family.paint(pipe, prompts, shape, steps=self.sizes.sample_steps, **options), prompts

        few = prompts[:32]
        usual = self.family.call[self.family.guidance_argument]
        drawn = self._drawn(len(few), self.shape, pipe.device)
        batches = {
            f"painted, guidance {usual}": painted(prompts),
            "drawn": ((drawn + 1) / 2, few),
            "drawn, through the autoencoder": ((reconstruct(pipe.vae, drawn) + 1) / 2, few),
        }
        for guidance in (1.0, 2.0, 3.0, 5.0):
            if guidance != usual:
                batches[f"painted, guidance {guidance}"] = painted(few, guidance=guidance)
        for longer in self.longer:
            batches[f"painted, {longer.frames} frames of {longer.size}px"] = painted(prompts[:16], longer, batch=8)
        return batches

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


@torch.no_grad()
def latent_statistics(family: VideoFamily, vae: nn.Module, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of these videos' latents, each float32 [C]."""
    latents = torch.cat([family.encode(vae, part).float().chunk(2, dim=1)[0] for part in sample.split(4)])
    return latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))


@torch.no_grad()
def encode_clips(
    family: VideoFamily, vae: nn.Module, numbers: torch.Tensor, pace: Pace, shape: Shape, batch: int
) -> torch.Tensor:
    """Render videos [N, K] and encode them to normalised bf16 latents, as many as the budget allows."""
    latents = []
    with family.quick_training(vae):
        for part in numbers.split(batch):
            if pace.spent >= 1:
                break
            moments = family.encode(vae, clips.render_clips(part, **shape._asdict()).to(vae.dtype)).float()
            latents.append(family.normalise(vae, moments.chunk(2, dim=1)[0]).bfloat16())
            pace.count(len(part), lambda: {"deviation": float(latents[-1].float().std())}, every=100)
    return torch.cat(latents)
