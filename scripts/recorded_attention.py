#!/usr/bin/env python3
"""What each policy loses on the queries, keys and values of a trained demo model: relative L1 error against sparsity.

Every attention of some steps of runs on held-out prompts is measured as it passes, against the dense one in float32:
SpargeAttn with and without its judge, top-k, SLA's sparse part and FG-Attn's slices by their policies, and tiles chosen
by their true masses, which no pooled map knows. FG-Attn's table 1 on the same attentions: how many tiles of which size
hold no probability above c/N, for N tokens, and how many may go for the same error. Writes a JSON file, Markdown tables
and a plot.

    python scripts/recorded_attention.py --output docs/results/recorded-attention-demo-wan     # under a minute on a GPU
    python scripts/recorded_attention.py --output /tmp/recorded --prompts 1 --steps 10 --every 5 --orders raster
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from attention_study.curves import TARGETS, Measurement
from attention_study.report import plot, tables
from demo_models import clips, prompts
from demo_models.loading import load_demo

from dit_accel.sparse.token_order import TOKEN_ORDERS
from dit_accel.tools.bench.origin import describe_run
from dit_accel.tools.capture import AttentionTap
from dit_accel.tools.demo import demo_arguments, demo_path

MODELS = {"demo-flux": prompts, "demo-hunyuan": clips, "demo-wan": clips}  # with what writes their prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json, .md and .png files")
    parser.add_argument("--model", choices=list(MODELS), default="demo-wan")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    parser.add_argument("--steps", type=int, help="of a run; the model's own by default")
    parser.add_argument("--every", type=int, default=10, help="one step in so many is measured")
    parser.add_argument("--orders", nargs="+", choices=TOKEN_ORDERS, default=TOKEN_ORDERS, help="of a clip's tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    folder = demo_path(options.model)
    if folder is None:
        parser.error(f"--model {options.model} is not in this package")
    arguments = demo_arguments(folder)
    options.steps = arguments["num_inference_steps"] = options.steps or arguments["num_inference_steps"]
    pipe = load_demo(options.model, options.dtype, options.device)
    started = time.perf_counter()
    measurement = Measurement(options.orders, options.every)
    with AttentionTap(pipe, measurement.visit):
        for prompt in MODELS[options.model].held_out_prompts(options.prompts, options.split):
            generator = torch.Generator("cpu").manual_seed(prompt.seed)
            pipe(**arguments, prompt=prompt.prompt, generator=generator, output_type="latent")
    results = measurement.results()

    settings = {key: getattr(options, key) for key in ("model", "prompts", "split", "steps", "every", "dtype")}
    document = {
        "settings": settings,
        **describe_run(pipe.device),
        "seconds": round(time.perf_counter() - started, 1),
        "attentions": measurement.attentions,
        "targets": TARGETS,
        "results": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(tables(results), encoding="utf-8")
    plot(results, options.model, options.output.with_suffix(".png"))
    print(tables(results))


if __name__ == "__main__":
    main()
