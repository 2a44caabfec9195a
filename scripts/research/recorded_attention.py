#!/usr/bin/env python3
"""Measure the error of each policy on queries, keys and values of a trained demo model: relative L1 against sparsity.

Attention of some steps of runs on held-out prompts is measured as it runs, against dense attention in float32:
SpargeAttn with and without its similarity test, top-k, SLA's sparse part and FG-Attn's slices by their policies, and
tiles chosen by their true masses, which no pooled map knows. FG-Attn's table 1 on the same data: the share of tiles, by
size, without a probability above c/N, for N tokens, and the share that can be skipped for the same error. Writes a JSON
file, Markdown tables and a plot.

    # under a minute on a GPU
    python -m scripts.research.recorded_attention --output docs/results/recorded-attention-demo-wan
    python -m scripts.research.recorded_attention --output /tmp/recorded --prompts 1 --steps 10 --every 5 \
        --orders raster
"""

from __future__ import annotations

import json
import time

from dit_accel.sparse.token_order import TOKEN_ORDERS
from dit_accel.tools.capture import AttentionTap
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.origin import describe_run
from scripts.demo_training import clips, prompts
from scripts.demo_training.loading import demo_folder, load_demo, run_prompts, study_parser
from scripts.research.attention_study.curves import TARGETS, Measurement
from scripts.research.attention_study.report import plot, tables
from scripts.tables import write_table

MODELS = {"demo-flux": prompts, "demo-hunyuan": clips, "demo-wan": clips}  # module that writes their prompts


def main() -> None:
    parser = study_parser(__doc__, list(MODELS), model="demo-wan", prompts=2, writes=".json, .md and .png")
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    parser.add_argument("--steps", type=int, help="steps of a run; default: the model's")
    parser.add_argument("--every", type=int, default=10, help="measure every n-th step")
    parser.add_argument(
        "--orders", nargs="+", choices=TOKEN_ORDERS, default=TOKEN_ORDERS, help="orders of a video's tokens"
    )
    options = parser.parse_args()

    arguments = demo_arguments(demo_folder(options.model))
    options.steps = arguments["num_inference_steps"] = options.steps or arguments["num_inference_steps"]
    pipe = load_demo(options.model, options.dtype, options.device)
    started = time.perf_counter()
    measurement = Measurement(options.orders, options.every)
    with AttentionTap(pipe, measurement.visit):
        run_prompts(pipe, MODELS[options.model].held_out_prompts(options.prompts, options.split), arguments)
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
    write_table(options.output.with_suffix(".md"), tables(results))
    plot(results, options.model, options.output.with_suffix(".png"))
    print(tables(results))


if __name__ == "__main__":
    main()
