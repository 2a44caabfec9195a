"""Generate a video on one device, or on two devices that each compute one branch of guidance.

    python examples/parallel.py --steps 30
    torchrun --nproc-per-node 2 examples/parallel.py --steps 30

Writes video.gif into the folder that ``--output`` names. Every process has the whole video; the first one writes it.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline

from dit_accel import accelerate_pipeline, parallelize_pipeline
from dit_accel.tools.demo import demo_arguments, demo_path, model_fps
from dit_accel.tools.media.video import as_clip, write_clip

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", type=Path, default=Path())
options = parser.parse_args()
options.output.mkdir(parents=True, exist_ok=True)

folder, ranks = demo_path("demo-wan"), int(os.environ.get("WORLD_SIZE", 1))
pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
if ranks > 1:
    dist.init_process_group("gloo")  # nccl on GPUs, after torch.cuda.set_device(LOCAL_RANK)
    parallelize_pipeline(pipe, branches=ranks)  # or ulysses=ranks, which splits the tokens of each call
accelerate_pipeline(pipe, "balanced")

call = demo_arguments(folder) | {"prompt": "a red ball rolls to the right", "num_inference_steps": options.steps}
frames = pipe(**call, generator=torch.Generator().manual_seed(0)).frames[0]
if ranks == 1 or dist.get_rank() == 0:
    print(pipe.dit_accel.report())
    write_clip(as_clip(frames), options.output / "video.gif", fps=model_fps("demo-wan"))
