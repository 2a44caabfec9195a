#!/usr/bin/env python3
"""Time whole calls of full-size pipelines with random weights, text encoders and autoencoders included.

    python -m scripts.bench.calls --models flux,wan-1.3b --output docs/results/calls.json
    torchrun --nproc-per-node 2 -m scripts.bench.calls --models flux --output docs/results/calls.json
    python -m scripts.bench.calls --tiny                              # the same paths on the CPU, at toy size

The ways of a call: diffusers as it is, with compiled blocks, with cache-dit and compiled blocks, and accelerated by
preset `exact` or `balanced`, for few steps with layers in 8 bits, and for videos by one that leaves out half of the
attention tiles; several GPUs run only the presets. Errors of forecasts and attention maps mean nothing with random
weights, so the computed steps are fixed, and are the same for `balanced` and cache-dit, and the tiles are random. Each
call is checked: its latents are finite, and its result has the right sides.

The JSON is written after each row. Rows of earlier commands stay in the file unless they are measured again.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dit_accel.errors import UnsupportedError, headline
from dit_accel.models.families import known_family
from dit_accel.models.parallel.branches import GROUP
from dit_accel.models.parallel.context_parallel import config_of
from dit_accel.models.parallel.parallelize import parallelize_pipeline
from dit_accel.tools.measure.origin import describe_run
from scripts.bench.call_speed.pipelines import CASES, Call, build, size, steps
from scripts.bench.call_speed.table import KEY, markdown
from scripts.bench.call_speed.ways import WAYS, measure, ways_of
from scripts.bench.model_speed.ranks import join, on_any
from scripts.tables import names_in, write_result

Row = dict[str, Any]


def main() -> int:
    options = _options()
    with ExitStack() as stack:
        rank, ranks = join(options.tiny, stack) if "RANK" in os.environ else (0, 1)
        rows: list[Row] = []
        facts = describe_run("cpu" if options.tiny else "cuda") | {"taken_gib": options.taken, "rows": rows}
        taken = torch.empty(int(options.taken * 2**30), dtype=torch.uint8, device="cpu" if options.tiny else "cuda")
        file = options.output
        document = {"runs": [*(json.loads(file.read_text())["runs"] if file and file.exists() else []), facts]}
        for name in options.models:
            for row in time_calls(name, options, ranks):
                rows.append(row)
                if rank == 0:
                    print(json.dumps(row), flush=True)
                    _write(document, options.output)
        if rank == 0:
            print(markdown({"runs": [facts]}))
        del taken
    return 1 if any("error" in row for row in rows) else 0


def time_calls(name: str, options: argparse.Namespace, ranks: int) -> Iterator[Row]:
    """Yield a row for each call of a model and each way."""
    case, tiny = CASES[name], options.tiny
    started = time.perf_counter()
    pipe = build(case, tiny=tiny)
    print(f"{name}: built in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    for call in (item for item in case.calls if item.steps <= options.most_steps):
        ways = options.ways or ways_of(call, alone=ranks == 1)
        facts = {"case": name, "model": case.model, "size": size(case, tiny=tiny), "steps": steps(call, tiny=tiny)}
        facts |= {"guidance": call.branches > 1, "gpus": ranks}
        for way in ways:
            row: Row = {}
            try:
                shared = _share(pipe, call, ranks) if ranks > 1 else {}
                row = shared | measure(pipe, case, call, way, options.runs, options.few, tiny=tiny)
            except Exception as problem:  # of a compiler, a kernel or another package; the other rows may still run
                row = {"error": headline(problem)}
            if ranks > 1 and on_any("error" in row) and "error" not in row:
                row = {"error": "another process failed"}
            yield {**facts, "way": way, **row}
        if hasattr(pipe.transformer, GROUP):
            delattr(pipe.transformer, GROUP)
    del pipe
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _share(pipe: Any, call: Call, ranks: int) -> Row:
    """Let all processes share a call: branches of guidance where the family has them, otherwise tokens."""
    sharing = known_family(pipe.transformer).sharing
    way = "branches" if call.branches == ranks and "branches" in sharing else "ulysses"
    if way not in sharing:
        raise UnsupportedError(f"{type(pipe.transformer).__name__} was not tested on several GPUs")
    if config_of(pipe.transformer) is None and not hasattr(pipe.transformer, GROUP):
        parallelize_pipeline(pipe, **{way: ranks})
    return {"parallel": f"{way}={ranks}"}


def _write(document: Row, file: Path | None) -> None:
    """Write the document without rows that the latest run has measured again on the same device."""
    if file is None:
        return
    *earlier, latest = document["runs"]
    again = {(latest["device"], *(row[key] for key in KEY)) for row in latest["rows"]}
    kept = [
        {**run, "rows": [row for row in run["rows"] if (run["device"], *(row[key] for key in KEY)) not in again]}
        for run in earlier
    ]
    write_result(file, {"runs": [*(run for run in kept if run["rows"]), latest]})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_in(CASES), default=list(CASES), help=f"among {', '.join(CASES)}")
    parser.add_argument("--ways", type=names_in(WAYS), help=f"among {', '.join(WAYS)}; default: those of each call")
    parser.add_argument("--runs", type=int, default=2, help="whole calls of cache-dit and the presets; default 2")
    parser.add_argument("--few", type=int, help="steps of diffusers' timed call, half of our warm-up's; default all")
    parser.add_argument("--most-steps", type=int, default=99, help="skip calls of more steps")
    parser.add_argument("--taken", type=float, default=0.0, help="GiB of each GPU that other programs take; default 0")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
