"""Generate an image plain and accelerated, and print the PSNR between both.

    python examples/image.py --steps 50

Writes plain.png and accelerated.png into the folder that ``--output`` names. The model is a small FLUX that ships with
dit-accel; for FLUX.1-dev on a GPU only change the lines that load it.
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.measure.metrics import psnr

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--output", type=Path, default=Path())
options = parser.parse_args()
options.output.mkdir(parents=True, exist_ok=True)

folder = demo_path("demo-flux")
pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
call = demo_arguments(folder) | {"prompt": "a yellow ring over the hills", "num_inference_steps": options.steps}

plain = pipe(**call, generator=torch.Generator().manual_seed(0)).images[0]
accelerate_pipeline(pipe, "balanced")
accelerated = pipe(**call, generator=torch.Generator().manual_seed(0)).images[0]
print(pipe.dit_accel.report())
restore_pipeline(pipe)

plain.save(options.output / "plain.png")
accelerated.save(options.output / "accelerated.png")
print(f"PSNR to the plain image: {psnr(accelerated, plain):.1f} dB")
