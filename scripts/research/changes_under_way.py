#!/usr/bin/env python3
"""Change the prompt in the middle of a run, and compare accelerated runs with plain runs that change the same way.

    python -m scripts.research.changes_under_way --output docs/results/changes-under-way --dtype bfloat16

A callback replaces the embeddings of the first held-out prompts with the embeddings of the following prompt, before
each of the steps in --before. Work is a share of the plain run's. Figures are means over prompts, and the lowest PSNR.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import numpy as np
import torch

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.tools.demo import demo_arguments, demo_names, demo_path
from dit_accel.tools.measure.metrics import psnr
from dit_accel.tools.measure.origin import describe_run
from scripts.demo_training.loading import held_out, load_demo, study_parser
from scripts.tables import as_json, write_table

EMBEDS = "prompt_embeds"


def main() -> None:
    parser = study_parser(__doc__, [*demo_names(), "all"], model="all", prompts=2, writes=".json and .md")
    parser.add_argument(
        "--before", type=int, nargs="+", default=[8, 10, 12, 20, 30], help="steps before which the prompt changes"
    )
    parser.add_argument("--preset", default="balanced")
    parser.add_argument("--side", type=int, help="image side in pixels; default: the model's")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    rows = []
    for model in demo_names() if options.model == "all" else [options.model]:
        arguments = demo_arguments(demo_path(model)) | {"output_type": "np", "return_dict": False}
        if options.side is not None:
            arguments |= {"height": options.side, "width": options.side}
        pipe = load_demo(model, options.dtype, options.device)
        rows += measured(pipe, arguments, model, options.prompts, options.before, options.preset)
    settings = {key: getattr(options, key) for key in ("prompts", "dtype", "preset", "side")}
    result = describe_run(options.device) | settings | {"rows": rows}
    options.output.with_suffix(".json").write_text(as_json(result), encoding="utf-8")
    write_table(options.output.with_suffix(".md"), table(rows))


def measured(
    pipe: Any, arguments: dict[str, Any], model: str, count: int, before: list[int], preset: str
) -> list[dict[str, Any]]:
    """Rows of one model: without a change, and with a change before each of the steps."""
    prompts = held_out(model, count + 1, "reporting")
    places = [None, *before]
    others = [embeddings(pipe, arguments, prompt.prompt) for prompt in prompts[1:]]
    pairs = list(zip(prompts, others, strict=False))
    plain = {at: [run(pipe, arguments, prompt, other, at) for prompt, other in pairs] for at in places}
    accelerate_pipeline(pipe, preset)
    rows = []
    for at in places:
        quality, work = [], []
        for (prompt, other), reference in zip(pairs, plain[at], strict=True):
            quality.append(psnr(run(pipe, arguments, prompt, other, at), reference))
            work.append(pipe.dit_accel.report().computed_fraction)
        figures = {"psnr_db": statistics.mean(quality), "lowest_db": min(quality), "computed": statistics.mean(work)}
        rows.append({"model": model, "before": at, **figures, "notes": pipe.dit_accel.report().notes})
        print(json.dumps(rows[-1]), flush=True)
    restore_pipeline(pipe)
    return rows


def embeddings(pipe: Any, arguments: dict[str, Any], prompt: str) -> torch.Tensor:
    """A prompt's embeddings as the pipeline's callbacks get them."""
    found = []

    def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        found.append(tensors[EMBEDS])
        return tensors

    called(pipe, arguments | {"num_inference_steps": 1}, prompt, 0, keep)
    return found[0]


def run(pipe: Any, arguments: dict[str, Any], prompt: Any, other: torch.Tensor, at: int | None) -> np.ndarray:
    """Frames of one run whose prompt changes before step ``at``."""

    def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors | {EMBEDS: other} if step + 1 == at else tensors

    return np.asarray(called(pipe, arguments, prompt.prompt, prompt.seed, change)[0][0])


def called(pipe: Any, arguments: dict[str, Any], prompt: str, seed: int, callback: Callable[..., Any]) -> Any:
    watched = partial(pipe, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=[EMBEDS])
    return watched(**arguments, prompt=prompt, generator=torch.Generator("cpu").manual_seed(seed))


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | prompt changes before | computed | PSNR dB | lowest |", "|---|---|---|---|---|"]
    for row in rows:
        place = "no change" if row["before"] is None else f"step {row['before']}"
        figures = f"{row['computed']:.2f} | {row['psnr_db']:.1f} | {row['lowest_db']:.1f}"
        lines.append(f"| {row['model']} | {place} | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
