"""Conditions of the closed loop's comparison with other methods: a cell, its pipeline and its call."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline

from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.measure.compare.methods import Subject
from dit_accel.tools.measure.compare.solvers import solver_over
from scripts.demo_training import clips
from scripts.demo_training import prompts as pictures
from scripts.demo_training.exporting import paint
from scripts.demo_training.loading import load
from scripts.demo_training.texture_demo import CollageDemo, TextureDemo

HELD_OUT = {
    "demo-flux": pictures.held_out_prompts,
    "demo-textures": TextureDemo.held_out,
    "demo-pictures": CollageDemo.held_out,
    "demo-wan": clips.held_out_prompts,
    "demo-hunyuan": clips.held_out_prompts,
}


@dataclass(frozen=True)
class Cell:
    """Conditions of a run; None = the model's own.

    `scheduler`: Euler's, or one of `compare.solvers.SOLVERS`. `guidance`: true classifier-free guidance of an image
    model, with an empty negative prompt. `strength`: image-to-image, starting from the images of other prompts.
    """

    model: str
    shift: float | None = None
    steps: int | None = None
    size: int | None = None
    dtype: str = "bfloat16"
    scheduler: str = "Euler"
    guidance: float | None = None
    strength: float | None = None

    def __str__(self) -> str:
        words = {
            f"shift {self.shift or 'own'}": True,
            f"{self.size}²": self.size,
            f"{self.steps} steps": self.steps,
            f"CFG {self.guidance}": self.guidance,
            f"image-to-image {self.strength}": self.strength,
            self.scheduler: self.scheduler != "Euler",
            self.dtype: self.dtype != "bfloat16",
        }
        return ", ".join([self.model, *(name for name, is_said in words.items() if is_said)])


CELLS = [
    Cell("demo-flux", shift=1.5),
    Cell("demo-flux", shift=4.5),
    Cell("demo-flux", shift=3.0, size=256),
    Cell("demo-flux", shift=1.5, dtype="float32"),
    Cell("demo-flux", shift=1.5, steps=28),
    Cell("demo-flux", shift=7.0, steps=100, size=256),
    Cell("demo-flux", shift=3.0, steps=20),
    Cell("demo-flux", shift=1.0, steps=12),
    Cell("demo-flux", shift=1.5, guidance=3.0),
    Cell("demo-flux", shift=3.0, steps=28, size=256, guidance=5.0),
    Cell("demo-flux", shift=3.0, strength=0.6),
    Cell("demo-flux", shift=3.0, scheduler="UniPC"),
    Cell("demo-flux", shift=1.5, steps=28, scheduler="DPM++ 2M"),
    Cell("demo-textures"),
    Cell("demo-textures", shift=3.0),
    Cell("demo-textures", shift=1.0, steps=28),
    Cell("demo-textures", shift=1.5, steps=100, size=256),
    Cell("demo-textures", shift=4.5, steps=20, guidance=3.0),
    Cell("demo-textures", shift=1.5, dtype="float32"),
    Cell("demo-pictures"),
    Cell("demo-pictures", shift=1.5, size=256),
    Cell("demo-pictures", shift=3.0, steps=28),
    Cell("demo-pictures", shift=3.0, steps=20),
    Cell("demo-pictures", shift=3.0, guidance=3.0),
    Cell("demo-pictures", shift=3.0, scheduler="UniPC"),
    Cell("demo-pictures", shift=1.5, steps=28, scheduler="DPM++ 2M"),
    Cell("demo-wan", shift=7.0),
    Cell("demo-wan", shift=3.0, scheduler="UniPC"),
    Cell("demo-wan", shift=3.0),
    Cell("demo-wan", shift=1.5, steps=28),
    Cell("demo-hunyuan", shift=7.0),
    Cell("demo-hunyuan", shift=7.0, scheduler="DPM++ 2M"),
    Cell("demo-hunyuan", shift=3.0),
    Cell("demo-hunyuan", shift=1.5, steps=28),
]


class Conditions:
    """A cell's plain pipeline, from a model's `folder`, and its runs."""

    def __init__(self, cell: Cell, folder: str, prompts: int, split: str, device: str) -> None:
        self.cell = cell
        pipe = load(Path(folder), getattr(torch, cell.dtype)).to(device)
        if cell.shift is not None:
            pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=cell.shift)
        if cell.scheduler != "Euler":
            pipe.scheduler = solver_over(pipe.scheduler, cell.scheduler)
        values = {"num_inference_steps": cell.steps, "height": cell.size, "width": cell.size}
        if cell.guidance is not None:
            values |= {"true_cfg_scale": cell.guidance, "negative_prompt": ""}
        self.arguments = demo_arguments(Path(folder)) | {
            key: value for key, value in values.items() if value is not None
        }
        steps = self.arguments["num_inference_steps"]
        self.prompts = HELD_OUT[cell.model](prompts, split)
        unseen = HELD_OUT[cell.model](prompts + 1, "tuning")[-1]
        self.pipe = pipe
        self._sources: dict[int, torch.Tensor] = {}  # by seed
        if cell.strength is not None:
            output = run(pipe, self.arguments, [unseen, *self.prompts])  # each starts from the previous image
            self._sources = {item.seed: picture for item, picture in zip([*self.prompts, unseen], output, strict=True)}
            self.pipe = FluxImg2ImgPipeline.from_pipe(pipe)
            self.pipe.set_progress_bar_config(disable=True)
            self.arguments["strength"] = cell.strength
            steps = round(steps * cell.strength)
        branches = 2 if "negative_prompt" in self.arguments else 1
        self.subject = Subject(self.pipe, steps, branches, lambda: self.run([unseen]))

    def run(self, prompts: Sequence[Any]) -> torch.Tensor:
        """Run prompts in one batch and return the outputs, 0..1."""
        source = {"image": torch.stack([self._sources[item.seed] for item in prompts])} if self._sources else {}
        return run(self.pipe, self.arguments | source, prompts)


def run(pipe: Any, arguments: dict[str, Any], prompts: Sequence[Any]) -> torch.Tensor:
    """Run a pipeline on prompts in one batch and return the outputs, 0..1."""
    call = dict(arguments)
    per_prompt = {"negative_prompt": call.pop("negative_prompt")} if "negative_prompt" in call else None
    return paint(pipe, list(prompts), batch=len(prompts), per_prompt=per_prompt, **call).clamp(0, 1)
