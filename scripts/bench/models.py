#!/usr/bin/env python3
"""Time full-size transformers with random weights: plain diffusers, its fastest dense run, and accelerated; on one GPU.

    python -m scripts.bench.models --model flux --output docs/results/speed-flux
    python -m scripts.bench.models --model wan-i2v-14b --runs dispatch --output docs/results/speed-wan-i2v-14b
    python -m scripts.bench.models --model flux --runs exact,linear,host --output docs/results/layers-on-host
    python -m scripts.bench.models --tiny                             # the same paths on the CPU, in seconds

Random weights give speed and memory, but say nothing about image quality. Their attention maps are noise: a policy runs
and costs its time, then a random choice with the given density replaces its own. Forecasts of their outputs fail, so
computed steps are forced at a fixed interval.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from dit_accel.tools.measure.origin import describe_run
from scripts.bench.model_speed.bench import TIMED_STEPS, Bench
from scripts.bench.model_speed.models import MODELS, TINY
from scripts.bench.model_speed.runs import RUNS
from scripts.bench.model_speed.table import compare, markdown
from scripts.tables import names_in, write_result


def main() -> int:
    options = _options()
    started, device = time.perf_counter(), "cpu" if options.tiny else "cuda"
    bench = Bench((TINY if options.tiny else MODELS)[options.model], device, options.timed_steps)
    rows = []
    results = {**describe_run(device), "model": options.model, "latents": bench.model.latents, "rows": rows}

    def add(row: dict) -> None:
        rows.append(row)
        compare(rows)
        results["seconds"] = time.perf_counter() - started
        print(json.dumps({key: value for key, value in row.items() if key != "preset"}), flush=True)
        write_result(options.output, results, markdown(results))

    add(bench.plain())
    for name in options.runs:
        for row in RUNS[name](bench):
            add(row)
    print(markdown(results))
    if options.output:
        print(f"wrote {options.output}.json and {options.output.name}.md")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="hunyuan")
    parser.add_argument(
        "--runs",
        type=names_in(RUNS),
        default="baseline,computed,fifty,dispatch",
        help=f"runs among {', '.join(RUNS)}, comma-separated; default %(default)s",
    )
    parser.add_argument("--timed-steps", type=int, default=TIMED_STEPS, help="per dense run; default %(default)s")
    parser.add_argument("--output", type=Path, help="stem of the .json and .md files, written after every row")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
