"""Write a pipeline's folder, sample prompts, and make contact sheets."""

import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from .prompts import HeldOutPrompt

Batch = tuple[torch.Tensor, list[HeldOutPrompt]]  # images or videos in 0..1, and the prompt of each


def write_folder(pipe: DiffusionPipeline, folder: Path, card: str, call: dict[str, Any]) -> int:
    """Write a pipeline, its card and the arguments of a call; return the folder's size in bytes."""
    pipe.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text(card)
    (folder / "demo.json").write_text(json.dumps(call) + "\n")
    for weights in folder.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors makes them readable by the owner only, and a wheel keeps modes
    for config in folder.rglob("*config.json"):
        values = json.loads(config.read_text(encoding="utf-8"))  # a resumed training leaves the source folder there
        kept = {key: value for key, value in values.items() if key not in ("_name_or_path", "local_files_only")}
        if kept != values:
            config.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@torch.no_grad()
def paint(
    pipe: DiffusionPipeline,
    prompts: list[HeldOutPrompt],
    *,
    batch: int,
    per_prompt: dict[str, Any] | None = None,
    **call: Any,
) -> torch.Tensor:
    """Sample prompts with the pipeline, each with its own seed: float32 [N, ...] in 0..1 on the CPU.

    `call` are arguments of a call; `per_prompt` are arguments with one entry for each of its `batch` prompts.
    """
    painted = []
    for start in range(0, len(prompts), batch):
        chunk = prompts[start : start + batch]
        output = pipe(
            prompt=[held_out.prompt for held_out in chunk],
            generator=[torch.Generator("cpu").manual_seed(held_out.seed) for held_out in chunk],
            output_type="pt",
            return_dict=False,
            **call,
            **{name: [value] * len(chunk) for name, value in (per_prompt or {}).items()},
        )
        painted.append(output[0].float().cpu())
    return torch.cat(painted)


def contact_sheet(pictures: torch.Tensor, captions: list[str], *, columns: int, cell: int) -> Image.Image:
    """Arrange images [N, 3, H, W] in 0..1 in a grid of cells `cell` pixels wide, each with its caption."""
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
