#!/usr/bin/env python3
"""Measure how much an error of the latents grows until the end of a run, by the noise level where it occurs.

At single steps the latents are shifted along the direction in which a linear forecast of the output errs there, and the
run continues normally; growth is the shift of the result divided by the applied shift. Writes a JSON file, and a figure
of the curves with the law of `dit_accel.loop.growth` and the weight of each step's error under three schedules.

    python -m scripts.research.growth_curve --output docs/results/growth.json --figure docs/figures/growth.png
    python -m scripts.research.growth_curve --output /tmp/growth.json \
        --models demo-flux demo-textures=/tmp/demo-textures
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from dit_accel.loop import growth
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.measure.origin import describe_run
from dit_accel.tools.media.figures import new_figure, tidy_axes
from scripts.research.conditions_study.cells import HELD_OUT
from scripts.tables import as_json

SHIFT = 1.5
STEPS = 50
REACH = 4  # steps between the records of the forecast, and from the last record to the forecast step
SIZE = 0.05  # shift of the latents, relative to a step's move
AT = (9, 12, 16, 20, 25, 30, 36, 42)
SHIFTS = (1.5, 4.5, 7.0)


@torch.no_grad()
def curve(model: str, folder: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Noise levels, and the growth from each level: the geometric mean over prompts."""
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32).to(options.device)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    prompts = HELD_OUT[model](options.prompts, "tuning")
    call = demo_arguments(Path(folder)) | {"num_inference_steps": STEPS, "height": options.size, "width": options.size}
    call |= {"prompt": [each.prompt for each in prompts], "output_type": "latent", "return_dict": False}

    def run(shift: dict[int, torch.Tensor], seen: list[torch.Tensor] | None = None) -> torch.Tensor:
        def after(_: Any, step: int, __: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            if seen is not None:
                seen.append(values["latents"].clone())
            return {"latents": values["latents"] + shift[step]} if step in shift else {}

        seeds = [torch.Generator("cpu").manual_seed(each.seed) for each in prompts]
        return pipe(**call, generator=seeds, callback_on_step_end=after)[0]

    latents: list[torch.Tensor] = []
    plain = run({}, latents)
    sigmas = pipe.scheduler.sigmas.tolist()
    found: dict[str, list[float]] = {"sigma": [], "growth": []}
    for step in AT:
        outputs = [
            (latents[i] - latents[i - 1]) / (sigmas[i + 1] - sigmas[i]) for i in (step, step - REACH, step - 2 * REACH)
        ]
        missed = 2 * outputs[1] - outputs[2] - outputs[0]
        size = SIZE * (sigmas[step] - sigmas[step + 1]) * norms(outputs[0]) / norms(missed)
        shift = missed * size.view(-1, *[1] * (missed.ndim - 1))
        grown = norms(run({step: shift}) - plain) / norms(shift)
        found["sigma"].append(round(sigmas[step + 1], 4))
        found["growth"].append(round(float(grown.log().mean().exp()), 3))
    return found


def norms(values: torch.Tensor) -> torch.Tensor:
    """L2 norm of each sample."""
    return values.float().flatten(1).norm(dim=1)


def draw(curves: dict[str, dict[str, list[float]]], file: Path) -> None:
    figure = new_figure(9, 3.4)
    left, right = figure.subplots(1, 2)
    for model, found in curves.items():
        left.plot(found["sigma"], found["growth"], marker="o", markersize=3, label=model)
    levels = np.linspace(0, 0.97, 200)
    left.plot(levels, (1 - levels) ** -growth.GROWTH, "k--", label=f"(1 − σ)^−{growth.GROWTH:g}")
    left.set(yscale="log", xlabel="noise level σ where the error is made", ylabel="growth until the end")
    left.legend(frameon=False)
    for shift in SHIFTS:
        even = np.linspace(1, 1 / STEPS, STEPS)
        weights = growth.error_weights(list(shift * even / (1 + (shift - 1) * even)))
        right.plot(range(STEPS), weights, label=f"shift {shift:g}")
    right.set(xlabel="step", ylabel="weight of an error of the output")
    right.legend(frameon=False)
    for axes in (left, right):
        tidy_axes(axes, "y")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--figure", type=Path, help="PNG file")
    parser.add_argument("--models", nargs="+", default=["demo-flux"], help="NAME, or NAME=FOLDER")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--size", type=int, default=256, help="side in pixels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    named = dict(name.partition("=")[::2] for name in options.models)
    curves = {name: curve(name, folder or str(demo_path(name)), options) for name, folder in named.items()}
    origin = describe_run(torch.device(options.device))
    options.output.write_text(as_json({"run": origin, "shift": SHIFT, "curves": curves}))
    if options.figure:
        draw(curves, options.figure)


if __name__ == "__main__":
    main()
