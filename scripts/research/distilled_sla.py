#!/usr/bin/env python3
"""Distil `demo-wan` to 4 steps with full attention and with SLA, and compare the students' videos.

    python -m scripts.research.distilled_sla --output docs/results/distilled-sla
    python -m scripts.research.distilled_sla --output /tmp/distilled-sla --smoke            # on any CPU

The teacher solves prompts with guidance, by Euler's method, in `FINE` parts of each of the students' steps. Students
begin with its weights, and learn the mean velocity of each step without guidance, as in `finetune_sla.py`. Their videos
of held-out prompts are compared with the teacher's of 50 steps, and with those of the student with full attention. A
second such student, trained on the same calls in another order, shows how far equal trainings differ.
"""

import argparse
import copy
import math
import statistics
import tempfile
import time
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline

from dit_accel import accelerated, load_preset
from dit_accel.sla.checkpoints import trained_preset
from dit_accel.sla.swap import restore_attention, save_swapped, swap_attention
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.measure.metrics import IDENTICAL, clip_ssim, psnr
from dit_accel.tools.measure.origin import describe_run
from scripts.demo_training.family import Shape
from scripts.demo_training.loading import demo_folder, load
from scripts.demo_training.training import configure_torch
from scripts.research.finetuning.calls import Calls
from scripts.research.finetuning.subjects import SUBJECTS
from scripts.research.finetuning.training import Training, fine_tune
from scripts.tables import as_json

MODEL, STEPS, FINE = "demo-wan", 4, 8
Sizes = namedtuple("Sizes", "prompts held_out steps batch at_once")  # at_once: prompts of the teacher
SIZES = Sizes(prompts=1024, held_out=24, steps=10_000, batch=64, at_once=128)
SLA = {"critical": 0.10, "negligible": 0.10}
FULL, AGAIN, FLOAT8 = "full attention", "full attention again", {"linear.dtype": "float8"}
WAYS: dict[str, dict[str, dict[str, Any] | None]] = {  # by student and name: changes of its preset; None = diffusers
    FULL: {"diffusers": None, "float8": FLOAT8},
    "SLA": {"diffusers, full attention": None, "SLA": {}, "SLA, float8": FLOAT8},
    AGAIN: {"diffusers": None},
}


@torch.no_grad()
def solve(pipe: WanPipeline, call: dict[str, Any], sizes: Sizes, seconds: float) -> Calls:
    """Return the calls of a student on the prompts, or on as many as the teacher solves in ``seconds``."""
    device, end, kept = pipe.device, time.monotonic() + seconds, []
    pipe.scheduler.set_timesteps(STEPS)
    levels = pipe.scheduler.sigmas.tolist()
    parts = [start + (stop - start) * part / FINE for start, stop in pairwise(levels) for part in range(FINE)] + [0.0]
    prompts, _ = SUBJECTS[MODEL].draw(sizes.prompts, 1)
    for first in range(0, sizes.prompts, sizes.at_once):
        if time.monotonic() > end:
            break
        chunk, generator = prompts[first : first + sizes.at_once], torch.Generator(device).manual_seed(first)
        texts = pipe.encode_prompt(chunk, [""] * len(chunk), max_sequence_length=call["max_sequence_length"])
        size = call["height"] // 8
        shape = len(chunk), pipe.transformer.config.in_channels, call["num_frames"] // 4 + 1, size, size
        path = [torch.randn(shape, device=device, generator=generator)]
        for level, following in pairwise(parts):
            arguments = path[-1].to(pipe.dtype), torch.full((len(chunk),), 1000 * level, device=device)
            prompted, free = (pipe.transformer(*arguments, text, return_dict=False)[0].float() for text in texts)
            path.append(path[-1] + (following - level) * (free + call["guidance_scale"] * (prompted - free)))
        for (start, stop), (level, following) in zip(pairwise(path[::FINE]), pairwise(levels), strict=True):
            arguments = {"hidden_states": start, "encoder_hidden_states": texts[0]}
            arguments["timestep"] = torch.full((len(chunk),), 1000 * level, device=device)
            kept.append(Calls(arguments, (stop - start) / (following - level)).to(device, pipe.dtype))
    joined = {name: torch.cat([calls.arguments[name] for calls in kept]) for name in kept[0].arguments}
    return Calls(joined, torch.cat([calls.velocity for calls in kept]))


def compared(videos: torch.Tensor, others: torch.Tensor) -> dict[str, Any]:
    """PSNR of each video in dB, its mean, and the mean SSIM of every fourth frame."""
    pairs = [(one.transpose(0, 1), other.transpose(0, 1)) for one, other in zip(videos, others, strict=True)]
    decibels = [round(min(psnr(*pair), IDENTICAL), 2) for pair in pairs]
    likeness = statistics.fmean(clip_ssim(one[::4], other[::4]) for one, other in pairs)
    return {"psnr_db": statistics.fmean(decibels), "ssim": likeness, "psnr_db_each": decibels}


class Study:
    """Videos of the held-out prompts, by name, and the document with their figures."""

    def __init__(self, pipe: WanPipeline, call: dict[str, Any], sizes: Sizes, output: Path) -> None:
        self.pipe, self.output, self.started = pipe, output.with_suffix(".json"), time.monotonic()
        self.prompts, self.shape = SUBJECTS[MODEL].held_out(sizes.held_out), Shape(call["num_frames"], call["height"])
        self.videos: dict[str, torch.Tensor] = {}
        settings = {"steps": STEPS, "sla": SLA, "call": call, "sizes": sizes._asdict()}
        self.document: dict[str, Any] = {**settings, **describe_run(pipe.device), "training": {}, "rows": []}

    def add(self, name: str, steps: int, guidance: float) -> None:
        """Run the prompts, and compare the videos with those of the first row and of the student without SLA."""
        family, call = SUBJECTS[MODEL].family, {"steps": steps, "guidance": guidance, "batch": 16}
        self.videos[name] = videos = family.paint(self.pipe, self.prompts, self.shape, **call)
        row = {"name": name, "agreement": SUBJECTS[MODEL].agreement(videos.to(self.pipe.device), self.prompts)}
        row["teacher"] = compared(videos, next(iter(self.videos.values())))
        if (full := f"{FULL}: diffusers") in self.videos:
            row["student"] = compared(videos, self.videos[full])
        self.document["rows"].append(row)
        self.output.write_text(as_json(self.document), encoding="utf-8")
        print(f"{time.monotonic() - self.started:4.0f} s  {name}: {row['teacher']['psnr_db']:.2f} dB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json file")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the teacher, and of the first training")
    parser.add_argument("--smoke", action="store_true", help="two training steps at toy size on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.smoke else "cuda")
    call, dtype, sizes = demo_arguments(demo_folder(MODEL)), torch.bfloat16, SIZES
    if options.smoke:
        call |= {"num_frames": 5, "height": 32, "num_inference_steps": 2}
        dtype, sizes = torch.float32, Sizes(4, 1, 2, 2, 4)
    else:
        configure_torch()
    pipe = load(demo_folder(MODEL), dtype).to(device)
    study = Study(pipe, call, sizes, options.output)
    study.add("teacher", call["num_inference_steps"], call["guidance_scale"])
    pipe.scheduler.sigma_min = 1 / STEPS  # calls of 4 steps begin at levels of 1, 3/4, 1/2 and 1/4, before the shift
    study.add(f"teacher, {STEPS} steps", STEPS, call["guidance_scale"])
    calls = solve(pipe, call, sizes, options.seconds)
    weights = copy.deepcopy(pipe.transformer.state_dict())
    training = Training(sizes.steps, sizes.batch, 5e-4, seconds=options.seconds)
    for student, ways in WAYS.items():
        pipe.transformer.load_state_dict(weights)
        if student == "SLA":
            swap_attention(pipe, **SLA)
        with tempfile.TemporaryDirectory() as tuned:
            log = fine_tune(pipe.transformer, calls, replace(training, seed=int(student == AGAIN)), Path(tuned))
            study.document["training"][student] = log
            training = replace(training, steps=log["steps"], seconds=math.inf)  # all students take as many
            if student == "SLA":
                save_swapped(pipe, tuned)
                restore_attention(pipe)
            for way, changes in ways.items():
                preset = partial(trained_preset, tuned) if student == "SLA" else partial(load_preset, "exact")
                with nullcontext() if changes is None else accelerated(pipe, preset(**changes)):
                    study.add(f"{student}: {way}", STEPS, 1.0)


if __name__ == "__main__":
    main()
