#!/usr/bin/env python3
"""Measure the effect of 8-bit linear layers and attention on the demo models' outputs, with and without the loop.

PSNR to the plain run on held-out prompts, for `exact` and the closed loop's preset: each unchanged, with linear layers
in int8 and in float8, and with every tile of attention in 8 bits.

    python -m scripts.research.layers_in_8_bits --dtype bfloat16 --output docs/results/layers-in-8-bits
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dit_accel import load_preset
from dit_accel.kernels.quantize import QK_DTYPES
from dit_accel.kernels.quantized_linear import LINEAR_DTYPES
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.metrics import IDENTICAL, psnr
from dit_accel.tools.origin import describe_run
from scripts.demo_training import clips
from scripts.demo_training import prompts as pictures
from scripts.demo_training.against_plain import AgainstPlain
from scripts.demo_training.loading import demo_folder, load_demo
from scripts.tables import write_table

BALANCED = {"demo-flux": "balanced", "demo-wan": "video-balanced", "demo-hunyuan": "video-balanced"}
ALL_TILES = {"policy": "sparge", "tau_kv": 0.0, "steps": "all"}
CASES = {  # settings of a preset, by the 8-bit parts
    "nothing": {},
    **{f"layers, {dtype}": {"linear": {"dtype": dtype}} for dtype in LINEAR_DTYPES},
    **{f"attention, {dtype}": {"skip": ALL_TILES, "kernels": {"qk_dtype": dtype}} for dtype in QK_DTYPES},
}


def measured(study: AgainstPlain, preset: str, case: str) -> dict[str, Any]:
    """Means over prompts, and PSNR of each prompt in dB."""
    each, fractions = [], []
    for made, plain, report in study.runs(load_preset(preset, **CASES[case])):
        each.append(min(psnr(made, plain), IDENTICAL))
        fractions.append(report.computed_fraction)
    means = {"psnr_db": statistics.fmean(each), "computed_fraction": statistics.fmean(fractions)}
    return {"preset": preset, "in_8_bits": case, **means, "psnr_db_each": each}


def table(results: list[dict[str, Any]]) -> str:
    """Format the rows, one line per run."""
    lines = ["| model | preset | in 8 bits | PSNR dB | worst | computed |", "|---|---|---|---|---|---|"]
    for row in results:
        figures = f"{row['psnr_db']:.1f} | {min(row['psnr_db_each']):.1f} | {row['computed_fraction']:.3f}"
        lines.append(f"| {row['model']} | {row['preset']} | {row['in_8_bits']} | {figures} |")
    return "\n".join(lines) + "\n"


def parser_of(description: str, *, prompts: int) -> argparse.ArgumentParser:
    """Parser with the options of a study of all demo models; `prompts` is a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json and .md files")
    parser.add_argument("--models", nargs="+", choices=list(BALANCED), default=list(BALANCED))
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--steps", type=int, help="steps of a run; default: the model's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def study_of(model: str, options: argparse.Namespace) -> AgainstPlain:
    """Run the held-out prompts plainly on a demo model."""
    arguments = demo_arguments(demo_folder(model))
    arguments["num_inference_steps"] = options.steps or arguments["num_inference_steps"]
    held_out = (pictures if model == "demo-flux" else clips).held_out_prompts(options.prompts, "reporting")
    return AgainstPlain(load_demo(model, options.dtype, options.device), arguments, held_out)


def main() -> None:
    options = parser_of(__doc__, prompts=6).parse_args()
    settings = {"prompts": options.prompts, "dtype": options.dtype}
    document = {"settings": settings, **describe_run(options.device), "results": []}
    for model in options.models:
        study = study_of(model, options)
        for preset, case in product(("exact", BALANCED[model]), CASES):
            document["results"].append({"model": model, **measured(study, preset, case)})
            options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(table(document["results"]).splitlines()[-1], flush=True)
    write_table(options.output.with_suffix(".md"), table(document["results"]))


if __name__ == "__main__":
    main()
