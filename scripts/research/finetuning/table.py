"""SLA's tables 2 and 3 on a demo model: every variant before and after the same fine-tuning, and the dense model.

One process records the dense model's calls and outputs; then each variant trains and is evaluated in its own process.
Several processes run in parallel, because a small model is launch-bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from dit_accel.sla.swap import load_swapped, save_swapped
from dit_accel.tools.demo import demo_arguments
from scripts.demo_training.exporting import contact_sheet

from .calls import Calls, record_calls
from .judging import HeldOut, hold_out, judge, paint
from .subjects import Subject
from .training import Training, fine_tune
from .variants import HEDGEHOG, VARIANTS

RECORDED_AT_ONCE = 64  # prompts
SHOWN = 2  # prompts in the sheet of frames
TEACHER, SAMPLES = "teacher-calls.safetensors", "samples.safetensors"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiment.

    Args:
        prompts: number of training prompts that the dense model samples.
        share: kept share of its calls.
        held_out: number of prompts for the evaluation.
        changes: changes to the arguments of a pipeline's call.
        training: training of each variant.
        variants: names of the variants; none = the subject's own.
    """

    prompts: int
    share: float
    held_out: int
    changes: dict[str, int]
    training: Training
    variants: tuple[str, ...] = ()


FULL = Sizes(
    prompts=256,
    share=0.5,
    held_out=24,
    changes={"num_inference_steps": 25},
    training=Training(steps=2000, batch=16, rate=5e-4, seconds=150),
)
PILOT = Sizes(
    prompts=32,
    share=0.25,
    held_out=8,
    changes={"num_inference_steps": 10},
    training=Training(steps=100, batch=16, rate=5e-4),
    variants=("linear", "sparse-95", "sla-95"),
)
SMOKE = Sizes(
    prompts=2,
    share=0.5,
    held_out=2,
    changes={"num_inference_steps": 2, "height": 192, "width": 192},
    training=Training(steps=2, batch=2, rate=5e-4),
    variants=("sparse-95", "sla-95"),
)


class Experiment:
    """The experiment on one model, in a work folder shared by its processes.

    Args:
        subject: subject of the model.
        model: its pipeline folder.
        sizes: sizes of the experiment.
        device: device of all computation.
        work: the work folder.
    """

    def __init__(self, subject: Subject, model: Path, sizes: Sizes, device: torch.device, work: Path) -> None:
        self.subject, self.model, self.sizes, self.device, self.work = subject, model, sizes, device, work
        self.variants = sizes.variants or subject.variants
        self.call = {**demo_arguments(model), **sizes.changes}
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def prepare(self) -> dict[str, Any]:
        """Record the data that all variants need; return the dense model's figures."""
        self.work.mkdir(parents=True, exist_ok=True)
        pipe = self._load()
        prompts, _ = self.subject.draw(self.sizes.prompts, seed=1)
        record_calls(pipe, prompts, self.call, share=self.sizes.share, batch=RECORDED_AT_ONCE, seed=0).save(
            self.work / TEACHER
        )
        held_out = hold_out(self.subject, pipe, self.sizes.held_out, self.call)
        held_out.save(self.work)
        return {"variant": "dense", "critical": 1.0, "before": judge(pipe, held_out.dense, held_out)}

    def run(self, name: str) -> dict[str, Any]:
        """Train and evaluate one variant; write its row and its samples to the work folder."""
        variant, held_out, folder = VARIANTS[name], HeldOut.load(self.subject, self.work), self.work / name
        pipe = self._load()
        variant.swap_in(pipe)
        before = judge(pipe, paint(self.subject, pipe, held_out.prompts, self.call), held_out)
        calls = Calls.load(self.work / TEACHER).to(self.device, self.dtype)
        log = fine_tune(pipe.transformer, calls, self.sizes.training, folder)
        if variant.feature_map != HEDGEHOG:  # no preset supports its maps
            save_swapped(pipe, folder)
            load_swapped(pipe, folder)
        painted = paint(self.subject, pipe, held_out.prompts, self.call)
        after = judge(pipe, painted, held_out)
        save_file({"painted": painted[:SHOWN].contiguous()}, folder / SAMPLES)
        row = {"variant": name, "critical": variant.critical, "before": before, "after": after, **log}
        (folder / "row.json").write_text(json.dumps(row) + "\n")
        return row

    def run_all(self, jobs: int) -> list[dict[str, Any]]:
        """Run all variants, `jobs` at a time, each in a new process with the same command.

        Returns their rows; a variant that fails is left out, and its output printed.
        """
        with ThreadPoolExecutor(jobs) as pool:
            return [row for row in pool.map(self._run_apart, self.variants) if row is not None]

    def _run_apart(self, name: str) -> dict[str, Any] | None:
        command = [sys.executable, *sys.argv, "--work", str(self.work), "--variant", name]
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if process.returncode:
            print(f"{name} failed:\n{process.stdout}", flush=True)
            return None
        return json.loads((self.work / name / "row.json").read_text())

    def sheet(self, names: list[str]) -> Image.Image:
        """Images of two held-out prompts, dense and after fine-tuning of these variants."""
        held_out = HeldOut.load(self.subject, self.work)
        shown = {"dense": held_out.dense[:SHOWN]}
        for name in names:
            shown[name] = load_file(self.work / name / SAMPLES)["painted"]
        strips = self.subject.strips(torch.cat(list(shown.values())) / 255)
        captions = [f"{name}: {held_out.prompts[index].prompt}" for name in shown for index in range(SHOWN)]
        return contact_sheet(strips, captions, columns=SHOWN, cell=720)

    def _load(self) -> DiffusionPipeline:
        return self.subject.family.load(self.model, self.dtype).to(self.device)
