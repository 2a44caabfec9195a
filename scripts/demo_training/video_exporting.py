"""Write trained parts to the folder of a video pipeline, and sample its videos."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from .exporting import paint, write_folder
from .prompts import HeldOutPrompt
from .video_family import TEXT_TOKENS, Shape, VideoFamily

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

Prompts it knows: a circle (ball), square (box), triangle, star or heart in red, orange, yellow (golden), green, blue or
purple, which moves (to the left, up to the right, ...), bounces (from side to side, up and down), turns or rests; or
two of them, one above the other; over green hills, a golden desert, a calm sea or snowy mountains; the camera may pan
left or right.
"""
NOTES = {
    "wan": {"template": "", "guidance": ""},
    "hunyuan": {
        "template": ", and a prompt template of the prompt alone",
        "guidance": " (`true_cfg_scale`); the embedded `guidance_scale` has no effect",
    },
}


def save_pipeline(
    family: VideoFamily,
    pipe: DiffusionPipeline,
    folder: Path,
    shape: Shape,
    longer: list[Shape],
    *,
    steps: int,
    words: list[str],
) -> int:
    """Write the pipeline, its card and the arguments of a call; return the folder's size in bytes."""
    card = MODEL_CARD.format(
        family=family.name,
        pipeline=type(pipe).__name__,
        millions=sum(weight.numel() for weight in pipe.transformer.parameters()) / 1e6,
        words=len(words),
        frames=shape.frames,
        size=shape.size,
        longer="".join(f" It makes {frames} frames of {size}x{size} too." for frames, size in longer),
        fps=FRAMES_PER_SECOND,
        tokens=TEXT_TOKENS,
        **NOTES[family.name],
    )
    sizes = {"height": shape.size, "width": shape.size, "num_frames": shape.frames, "num_inference_steps": steps}
    facts = {"fps": FRAMES_PER_SECOND, "preset": PRESET, "words": words}
    return write_folder(pipe, folder, card, {**sizes, **family.call, **facts})


def paint_clips(
    family: VideoFamily,
    pipe: DiffusionPipeline,
    prompts: list[HeldOutPrompt],
    *,
    frames: int,
    size: int,
    steps: int,
    guidance: float | None = None,
    batch: int = 16,
) -> torch.Tensor:
    """Sample videos with the pipeline, float32 [N, 3, frames, size, size] in 0..1 on the CPU, each with its seed."""
    call = dict(family.call)
    if guidance is not None:
        call[family.guidance_argument] = guidance
    call.pop("negative_prompt", None)
    shape = {"height": size, "width": size, "num_frames": frames, "num_inference_steps": steps}
    painted = paint(pipe, prompts, batch=batch, per_prompt={"negative_prompt": ""}, **shape, **call)
    return painted.transpose(1, 2).contiguous()
