"""Accelerate a transformer in your own denoising loop, without a pipeline.

    python examples/own_loop.py --steps 50

dit-accel only needs to know the loop's timesteps, in order, as the transformer gets them.
"""

import argparse

import torch
from diffusers import DiffusionPipeline

from dit_accel import accelerate_transformer
from dit_accel.tools.demo import demo_path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

pipe = DiffusionPipeline.from_pretrained(demo_path("demo-flux"), dtype=torch.float32)
transformer, scheduler = pipe.transformer, pipe.scheduler
text, pooled, text_ids = pipe.encode_prompt("a yellow ring over the hills", None, max_sequence_length=64)
noise = torch.Generator().manual_seed(0)
latents, image_ids = pipe.prepare_latents(1, 16, 512, 512, torch.float32, "cpu", noise)
given = {"encoder_hidden_states": text, "pooled_projections": pooled, "txt_ids": text_ids, "img_ids": image_ids}

scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / options.steps, options.steps).tolist(), mu=1.0)
timesteps = scheduler.timesteps / 1000  # FLUX takes them between 0 and 1
acceleration = accelerate_transformer(transformer, "balanced", timesteps)
with torch.no_grad():
    for step, timestep in enumerate(timesteps):
        velocity = transformer(latents, timestep=timestep.expand(1), **given, return_dict=False)[0]
        latents = scheduler.step(velocity, scheduler.timesteps[step], latents, return_dict=False)[0]
print(acceleration.report())
acceleration.restore()
