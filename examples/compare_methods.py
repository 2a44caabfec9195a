"""Compare four methods on one prompt: computed fraction, and PSNR against the plain image.

    python examples/compare_methods.py --steps 50

``dit-accel compare`` does this for many prompts, and includes the caches of diffusers.
"""

import argparse

import torch
from diffusers import DiffusionPipeline

from dit_accel import accelerated
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.measure.metrics import psnr

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

folder = demo_path("demo-flux")
pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
call = demo_arguments(folder) | {"prompt": "a yellow ring over the hills", "num_inference_steps": options.steps}


def image():
    return pipe(**call, generator=torch.Generator().manual_seed(0)).images[0]


pipe.set_progress_bar_config(disable=True)
plain = image()
print(f"{'preset':16} {'computed':>8} {'PSNR':>8}")
for preset in ("balanced", "turbo", "flux-taylorseer", "flux-fora"):
    with accelerated(pipe, preset):
        quality = psnr(image(), plain)
        print(f"{preset:16} {pipe.dit_accel.report().computed_fraction:8.2f} {quality:5.1f} dB")
