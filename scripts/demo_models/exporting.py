"""From trained parts to a pipeline folder, its pictures, and the state that training can go on from."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

from .flow import SHIFT, SHIFT_TOKENS
from .prompts import HeldOutPrompt
from .scenes import vocabulary
from .text_encoders import TEXT_TOKENS

SHARD_BYTES = 14 * 2**20

MODEL_CARD = """---
license: apache-2.0
library_name: diffusers
---
# demo-flux

A FLUX pipeline of {millions:.1f} million transformer parameters, trained from scratch on pictures that
`scripts/train_demo_flux.py` draws itself: paper stickers over paper landscapes. It knows {words} words, needs no
network, and exists to try acceleration methods and to measure what they cost in picture quality.

```python
import torch
from diffusers import FluxPipeline
pipe = FluxPipeline.from_pretrained("dit_accel/tools/assets/demo-flux", torch_dtype=torch.bfloat16)
prompt = "three yellow stars at the top over green hills at night"
image = pipe(prompt, height=512, width=512, num_inference_steps=50, max_sequence_length={tokens}).images[0]
```

Pass `max_sequence_length={tokens}`, the padded text length of nearly all its training; the pipeline's default of 512
works too and costs time. Sizes: 512x512 and 256x256. The model is not guidance-distilled, so `guidance_scale` has no
effect. Its schedule is shifted more than FLUX.1-dev's: what a picture shows is settled at high noise.

Prompts it knows: a count (a, two, three, four), size (small, large), colour (red, orange, yellow, green, blue, purple,
pink), texture (striped, dotted), shape (circle, square, triangle, star, heart, ring), position (on the left, on the
right, in the middle, at the top, at the bottom) or relation (above, below, left of, right of), over a place (green
hills, a golden desert, a calm sea, snowy mountains) at noon, at sunset or at night.
"""


def assemble_pipeline(
    vae: AutoencoderKL, transformer: FluxTransformer2DModel, tokenizers: tuple, encoders: tuple
) -> FluxPipeline:
    """The pipeline, with FLUX.1-dev's schedule: shifted by the number of image tokens."""
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=SHIFT[0],
        max_shift=SHIFT[1],
        base_image_seq_len=SHIFT_TOKENS[0],
        max_image_seq_len=SHIFT_TOKENS[1],
    )
    pipe = FluxPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=tokenizers[0],
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizers[1],
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save_pipeline(pipe: FluxPipeline, folder: Path) -> int:
    """Write the pipeline, its card and the arguments of a call; returns the folder's size in bytes."""
    millions = sum(weight.numel() for weight in pipe.transformer.parameters()) / 1e6
    card = MODEL_CARD.format(millions=millions, words=len(vocabulary()), tokens=TEXT_TOKENS)
    call = {"height": 512, "width": 512, "num_inference_steps": 50, "max_sequence_length": TEXT_TOKENS}
    return write_folder(pipe, folder, card, call)


def write_folder(pipe: DiffusionPipeline, folder: Path, card: str, call: dict[str, Any]) -> int:
    """Write a pipeline, its card and the arguments of a call; returns the folder's size in bytes."""
    pipe.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text(card)
    (folder / "demo.json").write_text(json.dumps(call) + "\n")
    for weights in folder.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes them for their owner alone, and a wheel keeps modes
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save_state(names: list[str], averages: list[torch.Tensor], folder: Path) -> None:
    """Write the averaged weights in float32, in shards of at most SHARD_BYTES."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, torch.Tensor] = {}
    shards = [shard]
    for name, weight in zip(names, averages, strict=True):
        if sum(held.nbytes for held in shard.values()) + weight.nbytes > SHARD_BYTES:
            shard = {}
            shards.append(shard)
        shard[name] = weight.cpu().contiguous()
    for index, held in enumerate(shards):
        save_file(held, folder / f"state-{index}.safetensors")


def load_state(folder: Path) -> dict[str, torch.Tensor]:
    """Read what `save_state` wrote.

    Raises:
        FileNotFoundError: the folder holds no shard.
    """
    shards = sorted(folder.glob("state-*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"--resume must name a folder with state-*.safetensors, got {folder}")
    return {name: weight for shard in shards for name, weight in load_file(shard).items()}


@torch.no_grad()
def paint_prompts(
    pipe: FluxPipeline, prompts: list[HeldOutPrompt], *, size: int, steps: int, batch: int = 32, text: int = TEXT_TOKENS
) -> torch.Tensor:
    """The pipeline's pictures, float32 [N, 3, size, size] in 0..1 on the CPU; each from its own seed."""
    pictures = []
    for start in range(0, len(prompts), batch):
        chunk = prompts[start : start + batch]
        output = pipe(
            prompt=[held_out.prompt for held_out in chunk],
            height=size,
            width=size,
            num_inference_steps=steps,
            generator=[torch.Generator("cpu").manual_seed(held_out.seed) for held_out in chunk],
            max_sequence_length=text,
            output_type="pt",
        )
        pictures.append(output.images.float().cpu())
    return torch.cat(pictures)


def contact_sheet(pictures: torch.Tensor, captions: list[str], *, columns: int, cell: int) -> Image.Image:
    """Pictures [N, 3, H, W] in 0..1 in a grid of cells `cell` pixels wide, each over its caption."""
    line, letters = 13, cell // 6
    rows = -(-len(pictures) // columns)
    cell_height = cell * pictures.shape[2] // pictures.shape[3]
    height = cell_height + 3 * line + 6
    sheet = Image.new("RGB", (columns * cell, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = index % columns * cell, index // columns * height
        pixels = (picture.permute(1, 2, 0) * 255).round().byte().numpy()
        sheet.paste(Image.fromarray(pixels).resize((cell, cell_height), Image.Resampling.LANCZOS), (left, top))
        for number, text in enumerate(textwrap.wrap(caption, letters)[:3]):
            draw.text((left + 4, top + cell_height + 3 + number * line), text, fill="black")
    return sheet
