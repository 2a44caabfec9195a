#!/usr/bin/env python3
"""Measure what the demo models lose when their weights are stored in 8 or 4 bits, with and without the loop.

Each form of the weights runs plainly and by the closed loop's preset. PSNR on held-out prompts, to the plain run of the
unchanged weights and to that of the same weights: the loop's own part of the error.

    python -m scripts.research.stored_weights --dtype bfloat16 --output docs/results/stored-weights
"""

import argparse
import statistics
from typing import Any

import torch

from dit_accel import load_preset
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.measure.metrics import IDENTICAL, psnr
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.card_memory.weights import WEIGHTS, bytes_of, why_not_available
from scripts.demo_training.loading import AgainstPlain, demo_folder, held_out, load_demo, study_parser
from scripts.research.setting_lists import BALANCED
from scripts.tables import as_json, names_in, write_table


def measured(model: str, weights: str, plain: AgainstPlain, options: argparse.Namespace) -> dict[str, Any]:
    """Row of one form: PSNR in dB of each prompt, and the computed fraction under the loop."""
    pipe = load_demo(model, options.dtype, options.device)
    WEIGHTS[weights][1](pipe.transformer)
    study = AgainstPlain(pipe, plain.arguments, plain.prompts)
    row: dict[str, Any] = {"model": model, "weights": weights, "gib": bytes_of(pipe.transformer) / 2**30}
    row["weights_db"] = [_db(expected, other) for expected, other in zip(study.plain, plain.plain, strict=True)]
    row["loop_db"], row["both_db"], fractions = [], [], []
    for (output, expected, report), other in zip(study.runs(load_preset(BALANCED[model])), plain.plain, strict=True):
        row["loop_db"].append(_db(output, expected))
        row["both_db"].append(_db(output, other))
        fractions.append(report.computed_fraction)
    return row | {"computed_fraction": statistics.fmean(fractions)}


def _db(one: torch.Tensor, other: torch.Tensor) -> float:
    return min(psnr(one, other), IDENTICAL)


def table(results: list[dict[str, Any]]) -> str:
    """Format the rows: mean and worst PSNR of the weights alone, the loop alone, and both."""
    lines = ["| model | weights | weights alone | loop alone | both | computed |", "|---|---|---|---|---|---|"]
    for row in results:
        figures = (row[name] for name in ("weights_db", "loop_db", "both_db"))
        cells = " | ".join(f"{statistics.fmean(item):.1f} / {min(item):.1f}" for item in figures)
        lines.append(f"| {row['model']} | {row['weights']} | {cells} | {row['computed_fraction']:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = study_parser(__doc__, [*BALANCED, "all"], model="all", prompts=8, writes=".json and .md")
    parser.add_argument("--weights", type=names_in(WEIGHTS), default=list(WEIGHTS), help=f"among {', '.join(WEIGHTS)}")
    parser.add_argument("--steps", type=int, help="steps of a run; default: the model's")
    options = parser.parse_args()
    settings = {"prompts": options.prompts, "dtype": options.dtype}
    document = {"settings": settings, **describe_run(options.device), "results": []}
    for model in BALANCED if options.model == "all" else [options.model]:
        arguments = demo_arguments(demo_folder(model))
        arguments["num_inference_steps"] = options.steps or arguments["num_inference_steps"]
        prompts = held_out(model, options.prompts, "reporting")
        plain = AgainstPlain(load_demo(model, options.dtype, options.device), arguments, prompts)
        for weights in options.weights:
            if (reason := why_not_available(weights)) is not None:
                print(f"{weights}: {reason}", flush=True)
                continue
            document["results"].append(measured(model, weights, plain, options))
            options.output.with_suffix(".json").write_text(as_json(document), encoding="utf-8")
            print(table(document["results"]).splitlines()[-1], flush=True)
    write_table(options.output.with_suffix(".md"), table(document["results"]))


if __name__ == "__main__":
    main()
