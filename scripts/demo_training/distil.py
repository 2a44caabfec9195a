"""Distil `demo-flux` to a few steps, and write it as a pipeline folder whose calls take so many steps.

    python -m scripts.demo_training.distil --steps 4 --output /tmp/distilled-4
    python -m scripts.demo_training.distil --steps 4 --output /tmp/distilled-4 --smoke          # on any CPU

The teacher solves a batch from noise with many Euler steps. Between two of its latents that are as far apart as the
student's steps, the student learns the mean velocity, as in progressive distillation (Salimans and Ho,
https://arxiv.org/abs/2202.00512) with all halvings at once. Prints the student's and the teacher's PSNR against the
teacher's run of many steps, on held-out prompts.
"""

import argparse
import copy
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import nn

from dit_accel.tools.demo import demo_path
from dit_accel.tools.measure.metrics import IDENTICAL, psnr
from scripts.demo_training.exporting import paint, write_folder
from scripts.demo_training.family import Texts
from scripts.demo_training.flux import PromptedFlow
from scripts.demo_training.image_demo import ImageDemo
from scripts.demo_training.text_encoders import TEXT_TOKENS
from scripts.demo_training.training import MasterWeights, Pace, configure_torch, draw_bank, put_in_bf16, take_weights

SOLVED_IN = 48  # steps of the teacher, a multiple of the student's
SIZE = 512  # pixels a side
CARD = """# demo-flux, distilled to {steps} steps

Made by `scripts/demo_training/distil.py` from `demo-flux`, to measure methods on a model of few steps.
"""


def main() -> None:
    options = _options()
    device = torch.device("cpu" if options.smoke else "cuda")
    configure_torch()
    demo, size = ImageDemo(small=options.smoke), 32 if options.smoke else SIZE
    teacher = FluxPipeline.from_pretrained(demo_path("demo-flux"), dtype=torch.float32)
    prompts, _ = draw_bank(demo.draw, demo.pack, demo.sizes.scenes, seed=1, parallel=not options.smoke)
    text = tuple(ids.to(device) for ids in demo.family.tokenize(demo.family.tokenizers_of(teacher), prompts))

    student = copy.deepcopy(teacher)
    weights, pace = distil(
        demo,
        demo.family.flow_of(copy.deepcopy(teacher)),
        sigmas_of(teacher, SOLVED_IN, size).to(device),
        text,
        options,
        size,
    )
    take_weights(student.transformer.parameters(), weights)
    words = {"num_inference_steps": options.steps, "max_sequence_length": TEXT_TOKENS, "words": demo.words}
    card = CARD.format(steps=options.steps)
    write_folder(student.to(torch.bfloat16), options.output, card, {"height": size, "width": size, **words})
    log = {"steps": options.steps, "losses": pace.losses, "images": pace.pictures}
    log |= fidelity(demo, teacher.to(device, torch.bfloat16), student.to(device), options.steps, size)
    (options.output / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    print(json.dumps({key: value for key, value in log.items() if key != "losses"}))


def sigmas_of(pipe: FluxPipeline, steps: int, size: int) -> torch.Tensor:
    """Noise levels of a call, float32 ``[steps + 1]`` from 1 to 0."""
    scheduler, config = copy.deepcopy(pipe.scheduler), pipe.scheduler.config
    ends = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=calculate_shift((size // 16) ** 2, *ends))
    return scheduler.sigmas


def distil(
    demo: ImageDemo, flow: PromptedFlow, sigmas: torch.Tensor, text: Texts, options: argparse.Namespace, size: int
) -> tuple[list[torch.Tensor], Pace]:
    """Return the averaged weights of a student's transformer, float32, and the log.

    `flow` is the float32 teacher, whose text encoders serve both; `sigmas` are the noise levels of its steps, with the
    0 at the end, and each m-th is one of the student's; `text` has a row for each prompt.
    """
    device = sigmas.device
    for encoder in (flow.clip, flow.t5):
        encoder.requires_grad_(False)
    masters = put_in_bf16(flow, device)
    teacher = PromptedFlow(copy.deepcopy(flow.transformer), flow.clip, flow.t5).requires_grad_(False).eval()
    if not options.smoke:
        demo.family.compile_blocks(flow)
        demo.family.compile_blocks(teacher)
    weights = MasterWeights(flow, masters, average_decay=0.995)
    pace = Pace("distilled", options.seconds, options.rate, most_steps=2 if options.smoke else None)
    generator = torch.Generator(device).manual_seed(3)
    stride = SOLVED_IN // options.steps
    levels = sigmas[::stride]
    while pace.spent < 1:
        rows = torch.randint(len(text[0]), (options.batch,), device=device, generator=generator)
        values = (text[0][rows], text[1][rows])
        noise = torch.randn(len(rows), (size // 16) ** 2, 64, device=device, generator=generator)
        path = [noise]  # by Euler's method
        with torch.no_grad():
            for level, following in pairwise(sigmas):
                path.append(path[-1] + (following - level) * _velocity(teacher, path[-1], level, values))
        path = path[::stride]
        total = torch.zeros((), device=device)
        for start in range(options.steps):
            velocity = _velocity(flow, path[start], levels[start], values)
            loss = (velocity - (path[start + 1] - path[start]) / (levels[start + 1] - levels[start])).square().mean()
            (loss / options.steps).backward()
            total += loss.detach() / options.steps
        weights.step(pace.rate)
        pace.count(len(rows), lambda latest=total: {"loss": float(latest)}, every=20)
    return weights.averages, pace


def _velocity(flow: nn.Module, latents: torch.Tensor, level: torch.Tensor, values: tuple) -> torch.Tensor:
    return flow(latents.bfloat16(), level.expand(len(latents)), *values).float()


def fidelity(demo: ImageDemo, teacher: FluxPipeline, student: FluxPipeline, steps: int, size: int) -> dict:
    """PSNR against the teacher's run of many steps, and the share of prompts whose attributes are right."""
    prompts = demo.held_out(demo.sizes.prompts, "tuning")
    call = {"batch": 32, "height": size, "width": size, "max_sequence_length": TEXT_TOKENS}
    for pipe in (teacher, student):
        pipe.set_progress_bar_config(disable=True)
    whole = paint(teacher, prompts, num_inference_steps=SOLVED_IN, **call)
    runs = {f"teacher, {SOLVED_IN} steps": whole}
    runs |= {f"teacher, {steps} steps": paint(teacher, prompts, num_inference_steps=steps, **call)}
    runs |= {f"student, {steps} steps": paint(student, prompts, num_inference_steps=steps, **call)}
    scenes = [item.scene for item in prompts]
    return {
        name: {
            "psnr": [round(min(psnr(*pair), IDENTICAL), 2) for pair in zip(whole, painted, strict=True)],
            **demo.agreement(demo.read(painted.to(teacher.device)), scenes),
        }
        for name, painted in runs.items()
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = [count for count in range(2, 13) if SOLVED_IN % count == 0]
    parser.add_argument("--steps", type=int, choices=steps, default=4, help="of the student")
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training")
    parser.add_argument("--batch", type=int, default=64, help="images of a training step")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--smoke", action="store_true", help="two training steps at toy size on the CPU")
    options = parser.parse_args()
    if options.smoke:
        options.batch = 1
    return options


if __name__ == "__main__":
    main()
