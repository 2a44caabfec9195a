"""Generate a video with a Wan model and its preset.

    python examples/video.py --steps 50

Writes video.gif into the folder that ``--output`` names. The model is a small Wan that ships with dit-accel; its
``demo.json`` holds the arguments that it was trained for, its frame rate and its preset.
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from dit_accel import accelerate_pipeline
from dit_accel.tools.demo import demo_arguments, demo_path, model_fps, model_preset
from dit_accel.tools.media.video import as_clip, write_clip

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--output", type=Path, default=Path())
options = parser.parse_args()
options.output.mkdir(parents=True, exist_ok=True)

folder = demo_path("demo-wan")
pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
call = demo_arguments(folder) | {"num_inference_steps": options.steps}

accelerate_pipeline(pipe, model_preset("demo-wan"))
prompt = "a red star moves to the right above a blue circle over the sea"
frames = pipe(prompt=prompt, **call, generator=torch.Generator().manual_seed(0)).frames[0]
write_clip(as_clip(frames), options.output / "video.gif", fps=model_fps("demo-wan"))
print(pipe.dit_accel.report())
