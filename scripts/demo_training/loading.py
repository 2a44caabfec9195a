"""Load and run the shipped demo models, with the options that studies share."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from dit_accel import Preset, RunReport
from dit_accel.pipeline import accelerated
from dit_accel.tools.demo import demo_path
from dit_accel.tools.measure.timing import run_pipeline

from . import clips, prompts
from .prompts import HeldOutPrompt


def demo_folder(model: str) -> Path:
    """Folder of a demo model; exits the script if this checkout does not have it."""
    folder = demo_path(model)
    if folder is None:
        raise SystemExit(f"--model {model} is not in this package")
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """Load a pipeline's folder without a progress bar."""
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_demo(model: str, dtype: str, device: str) -> DiffusionPipeline:
    """Load a demo model's pipeline; `dtype` is the name of a torch dtype."""
    return load(demo_folder(model), getattr(torch, dtype)).to(device)


def held_out(model: str, count: int, split: str) -> list[HeldOutPrompt]:
    """Return the first held-out prompts of a demo model."""
    return (prompts if model == "demo-flux" else clips).held_out_prompts(count, split)


def study_parser(
    description: str, models: Sequence[str], *, model: str, prompts: int, writes: str
) -> argparse.ArgumentParser:
    """Parser with the options of demo model studies; `model` and `prompts` are defaults, `writes` the file types."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"stem of the {writes} files")
    parser.add_argument("--model", choices=list(models), default=model)
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


class AgainstPlain:
    """Runs prompts plainly once, and again with each preset; `arguments` are the call's, except prompt and generator.

    `plain`: the plain output of each prompt, float32 `[frames, 3, height, width]` in 0..1.
    """

    def __init__(self, pipe: Any, arguments: dict[str, Any], prompts: Sequence[HeldOutPrompt]) -> None:
        self.pipe = pipe
        self.arguments = arguments
        self.prompts = prompts
        self.plain = [self._call(prompt) for prompt in prompts]

    def runs(self, preset: Preset) -> Iterator[tuple[torch.Tensor, torch.Tensor, RunReport]]:
        """Yield for each prompt the output with the preset, the plain output, like `plain`, and the report."""
        for prompt, plain in zip(self.prompts, self.plain, strict=True):
            with accelerated(self.pipe, preset):
                output = self._call(prompt)
                report = self.pipe.dit_accel.report()
            yield output, plain, report

    def _call(self, prompt: HeldOutPrompt) -> torch.Tensor:
        return run_pipeline(self.pipe, self.arguments, prompt.prompt, prompt.seed)["frames"]
