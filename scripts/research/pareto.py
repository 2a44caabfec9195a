#!/usr/bin/env python3
"""Compare speed and quality of every preset, of the papers' fixed schedules and of all other methods, on a demo model.

Each run is compared with the plain run of the same held-out prompt and seed. Writes a JSON file, Markdown tables and
two plots, over computed fraction and over time; docs/notes/comparisons.md explains them. An interrupted sweep resumes
where it stopped.

    python -m scripts.research.pareto --model demo-flux                                # docs/results/pareto-demo-flux.*
    # on a CPU
    python -m scripts.research.pareto --model demo-flux --prompts 1 --height 256 --width 256 --output /tmp/pareto

Several processes can share a sweep, and one more merges their results. They slow each other down, so afterwards the
times are measured again by one process alone:

    for i in 1 2 3; do python -m scripts.research.pareto --model demo-wan --shard $i/3 & done; wait
    python -m scripts.research.pareto --model demo-wan --merge
    python -m scripts.research.pareto --model demo-wan --retime

Prompts come from the `reporting` list, which no preset was tuned on; `--split tuning` is for choosing thresholds.
"""

import argparse
import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch

from dit_accel import load_preset, preset_names
from dit_accel.models.families import pipeline_family
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.measure.compare import PEERS, Bench, Method, Prompt, Sweep, of_preset, our_methods, peer_methods
from dit_accel.tools.measure.origin import describe_run
from dit_accel.tools.measure.repeats import REPEATS
from scripts.demo_training.loading import held_out, load_demo

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FAMILIES = {"demo-flux": ("flux", "kontext"), "demo-hunyuan": ("hunyuan",), "demo-wan": ("wan21",)}
LOOPS = ("quality", "balanced", "turbo")  # names that fit any model; the target of `balanced` is varied


def fixed_schedules(pipe: Any) -> list[Method]:
    """The papers' schedules on our engine: TaylorSeer and FORA per layer, and fixed intervals at level ``output``."""
    methods = []
    known = pipeline_family(pipe)
    family = "any" if known is None else known.name
    settings = [(3, 1, 3), (3, 1, 4), (3, 1, 5), (3, 1, 6), (3, 1, 8), (3, 2, 3), (3, 2, 4), (8, 1, 4), (8, 2, 6)]
    for warmup, order, interval in settings:
        schedule = {"warmup": warmup, "interval": interval, "cooldown": 1}
        changes = {"schedule": schedule, "forecast": {"order": order}}
        label = f"W={warmup} N={interval} D={order}"
        stack = load_preset("exact", **changes)
        methods.append(of_preset("fixed interval, whole stack", f"stack {label}", stack))
        if family != "any":
            layers = load_preset("flux-taylorseer", model=family, **changes)
            methods.append(of_preset("TaylorSeer, our engine", f"layers {label}", layers))
    if family != "any":
        for warmup, interval in itertools.product((3, 8), (3, 4, 6)):
            changes = {"schedule": {"warmup": warmup, "interval": interval, "cooldown": 1}}
            reuse = load_preset("flux-taylorseer", model=family, **changes, forecast={"method": "reuse", "order": 0})
            methods.append(of_preset("FORA, our engine", f"FORA W={warmup} N={interval}", reuse))
    return methods


def chosen(methods: list[Method], only: list[str], shard: tuple[int, int]) -> list[Method]:
    """Select methods by name or series (none given: all), and every N-th of them from the I-th."""
    known = {name for method in methods for name in (method.name, method.series)}
    unknown = [name for name in only if name not in known]
    if unknown:
        there = ", ".join(sorted(known))
        raise SystemExit(f"--only names no method or series: {', '.join(unknown)}; there are: {there}")
    named = [method for method in methods if not only or {method.name, method.series} & set(only)]
    return named[shard[0] - 1 :: shard[1]]


def settings_of(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the pipeline's call, and the settings that all rows of one comparison share."""
    arguments = demo_arguments(demo_path(options.model))
    values = {"num_inference_steps": options.steps, "height": options.height, "width": options.width}
    values["num_frames"] = options.frames
    arguments |= {key: value for key, value in values.items() if value is not None}
    common = {key: getattr(options, key) for key in ("model", "prompts", "split", "dtype")}
    return arguments, {**common, **{key: arguments.get(key) for key in values}}


def shard(text: str) -> tuple[int, int]:
    """Parse ``I/N`` into two numbers."""
    part, whole = (int(number) for number in text.split("/"))
    if not 1 <= part <= whole:
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text}")
    return part, whole


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(FAMILIES), default="demo-flux")
    parser.add_argument("--output", type=Path, help="stem of the files; default: docs/results/pareto-MODEL")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    parser.add_argument("--steps", type=int, help="default, as for --height, --width and --frames: the model's")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--frames", type=int)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="other methods; default: all")
    parser.add_argument("--only", nargs="+", default=[], help="only these methods or series, even if measured before")
    parser.add_argument("--shard", type=shard, default=(1, 1), help="I/N: every N-th method, into a separate file")
    parser.add_argument("--merge", action="store_true", help="merge the files of shards instead of measuring")
    parser.add_argument("--retime", action="store_true", help="measure only the times of existing rows again")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs per time, at least; times are medians")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    options.output = options.output or RESULTS / f"pareto-{options.model}"
    return options


def main() -> None:
    options = parse()
    arguments, settings = settings_of(options)
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()

    load = partial(load_demo, options.model, options.dtype, options.device)
    pipe = load()
    presets = [name for name in preset_names() if name.split("-")[0] in FAMILIES[options.model]]
    others, left_out = peer_methods(pipe, arguments["num_inference_steps"], options.peers)
    methods = [*our_methods(pipe, [*LOOPS, *presets], "balanced"), *fixed_schedules(pipe), *others]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    part, whole = options.shard
    stem = options.output if whole == 1 else options.output.with_name(f"{options.output.name}-shard-{part}of{whole}")
    sweep = Sweep(stem, settings)
    if options.merge:
        for file in sorted(stem.parent.glob(f"{stem.name}-shard-*.json")):
            sweep.merge(file, [method.name for method in methods])
            file.unlink()
    else:
        count = min(options.prompts, options.repeats) if options.retime else options.prompts
        *prompts, tuning = (
            Prompt(item.prompt, item.seed)
            for item in (
                *held_out(options.model, count, options.split),
                held_out(options.model, options.prompts + 1, "tuning")[-1],
            )
        )
        bench = Bench(load, arguments, prompts, tuning, repeats=options.repeats)
        sweep.describe(bench, describe_run(bench.pipe.device), left_out)
        (retime if options.retime else measure)(bench, sweep, chosen(methods, options.only, options.shard), options)
    if whole == 1:
        for file in sweep.publish():
            print(f"wrote {file}")


def measure(bench: Bench, sweep: Sweep, methods: list[Method], options: argparse.Namespace) -> None:
    """Add rows of methods that have none, or that were selected by name."""
    started = time.perf_counter()
    for method in sweep.missing(methods, [method.name for method in methods] if options.only else ()):
        row = bench.measure(method)
        sweep.add(row)
        found = row.get("error") or f"{row['computed_fraction']:.3f}  {row['psnr_db']:.1f} dB"
        print(f"{time.perf_counter() - started:6.0f} s  {method.name:40s} {found}", flush=True)


def retime(bench: Bench, sweep: Sweep, methods: list[Method], options: argparse.Namespace) -> None:
    """Measure the times of existing rows again."""
    rows = {row["name"]: row for row in sweep.rows}
    missing = {method.name for method in sweep.missing(methods)}
    for method in methods:
        if method.name in missing:
            print(f"{method.name}: not timed: no figures, or figures of another preset", flush=True)
            continue
        try:
            sweep.add(rows[method.name] | bench.retime(method))
        except Exception as error:  # go on with the others
            print(f"{method.name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
