#!/usr/bin/env python3
"""Quality of every preset and of the fixed schedules beside them, on held-out prompts of a demo model.

Each run is compared with the plain run of the same prompt and seed. Writes a JSON file, a Markdown table and a plot.

    python scripts/quality.py --output docs/results/quality-demo-flux                 # 10 prompts, minutes on a GPU
    python scripts/quality.py --output /tmp/quality --prompts 1 --height 256 --width 256 --only flux-balanced
    python scripts/quality.py --model demo-wan --output docs/results/quality-demo-wan

Prompts come from the `reporting` list, which presets were never tuned on; `--split tuning` is for choosing thresholds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from demo_models import clips, prompts

from dit_accel import accelerated, load_preset, preset_names
from dit_accel.bench.origin import describe_run
from dit_accel.demo import demo_arguments, demo_path
from dit_accel.metrics import clip_ssim, latent_error, psnr
from dit_accel.presets import Preset
from dit_accel.visualize import best_settings, frontier_plot

CLOSED_LOOP = "closed loop (ours)"
CLOSED_LOOP_DENSE = "closed loop (ours), no tiles left out"
PREFIXES = {"demo-flux": ("flux", "kontext"), "demo-hunyuan": ("hunyuan",), "demo-wan": ("wan21",)}  # of their presets


def methods(model: str) -> list[tuple[str, str, Preset | int]]:
    """(series, name, preset or number of steps) of everything that is compared on a demo model."""
    family = PREFIXES[model][0]
    listed: list[tuple[str, str, Preset | int]] = []
    # On FLUX, whose presets leave no tiles out, the any-* presets give the same pictures.
    prefixes = PREFIXES[model] if family == "flux" else (*PREFIXES[model], "any")
    for name in preset_names():
        if name.split("-")[0] in prefixes:
            listed.append((_series(name, load_preset(name)), name, load_preset(name)))
    settings = [*itertools.product((3, 8), (1, 2), (3, 4, 5, 6)), (3, 1, 7), (3, 1, 8)]
    for warmup, order, interval in settings:
        changes = {"schedule": {"warmup": warmup, "interval": interval}, "forecast": {"order": order}}
        label = f"W={warmup} N={interval} D={order}"
        listed.append(("TaylorSeer", f"TaylorSeer {label}", load_preset(f"{family}-taylorseer", **changes)))
        whole = load_preset("exact", **changes, **{"schedule.final_full": 1})
        listed.append(("fixed interval, stack", f"stack {label}", whole))
    for warmup, interval in itertools.product((3, 8), (3, 4, 5, 6)):
        changes = {"schedule": {"warmup": warmup, "interval": interval}, "forecast": {"method": "reuse", "order": 0}}
        listed.append(("FORA", f"FORA W={warmup} N={interval}", load_preset(f"{family}-taylorseer", **changes)))
    for steps in (10, 13, 15, 18, 20, 25, 30, 35):
        listed.append(("fewer steps", f"{steps} steps", steps))
    return listed


def closed_loop_variants() -> list[tuple[str, str, Preset | int]]:
    """Thresholds, orders, coordinates and warm-ups of the closed loop, for choosing presets on the `tuning` split."""
    listed: list[tuple[str, str, Preset | int]] = []
    for coordinate, order, warmup in itertools.product(("step", "sigma"), (1, 2), (2, 4, 6)):
        for target in (0.025, 0.05, 0.1):
            changes = {
                "schedule": {"warmup": warmup, "target_error": target},
                "forecast": {"order": order, "coordinate": coordinate},
            }
            series = f"{coordinate} D={order} W={warmup}"
            listed.append((series, f"{series} target={target}", load_preset("any-balanced", **changes)))
    return listed


def _series(name: str, preset: Preset) -> str:
    if preset.schedule.control == "error":
        return CLOSED_LOOP if preset.model != "any" else CLOSED_LOOP_DENSE
    return {"taylorseer": "TaylorSeer", "fora": "FORA"}.get(name.split("-")[1], "FlashOmni")


class Comparison:
    """Runs methods on prompts and compares each with the plain run.

    Args:
        pipe: the pipeline, in place.
        arguments: of its call, without prompt and generator.
        prompts: held-out prompts with their seeds.
    """

    def __init__(self, pipe: Any, arguments: dict[str, Any], prompts: list[Any]) -> None:
        self._pipe = pipe
        self._arguments = arguments
        self._prompts = prompts
        self._plain = [self._call(prompt) for prompt in prompts]

    def measure(self, series: str, name: str, method: Preset | int) -> dict[str, Any]:
        """Means over prompts: PSNR (dB), SSIM, relative latent error, computed fraction, seconds of the transformer."""
        figures: dict[str, list[float]] = {
            key: [] for key in ("psnr_db", "ssim", "latent_error", "computed_fraction", "seconds")
        }
        for prompt, plain in zip(self._prompts, self._plain, strict=True):
            if isinstance(method, int):
                result = self._call(prompt, num_inference_steps=method)
                figures["computed_fraction"].append(method / self._arguments["num_inference_steps"])
            else:
                with accelerated(self._pipe, method):
                    result = self._call(prompt)
                    report = self._pipe.dit_accel.report()
                figures["computed_fraction"].append(report.computed_fraction)
                figures["seconds"].append(report.seconds)
            figures["psnr_db"].append(psnr(result["frames"], plain["frames"]))
            figures["ssim"].append(clip_ssim(result["frames"], plain["frames"]))
            figures["latent_error"].append(latent_error(result["latents"], plain["latents"]))
        means = {key: statistics.fmean(values) if values else None for key, values in figures.items()}
        return {
            "series": series,
            "name": name,
            **means,
            "psnr_db_each": figures["psnr_db"],
            "computed_fraction_each": figures["computed_fraction"],
        }

    def _call(self, prompt: Any, **changes: Any) -> dict[str, torch.Tensor]:
        """The last latents, and their frames ``[frames, 3, height, width]`` in 0..1; a picture is one frame."""
        latents: list[torch.Tensor] = []

        def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            latents[:] = [tensors["latents"]]
            return tensors

        generator = torch.Generator("cpu").manual_seed(prompt.seed)
        call = {**self._arguments, **changes, "prompt": prompt.prompt, "generator": generator, "output_type": "pt"}
        frames = self._pipe(**call, callback_on_step_end=keep)[0][0]
        return {"latents": latents[0].float().cpu(), "frames": frames.float().cpu().view(-1, *frames.shape[-3:])}


def margins(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each closed-loop preset's lead in dB over the fixed schedules at its own computed fraction.

    The rival is the frontier of all that is not closed loop, interpolated linearly between its two nearest settings.
    """
    loops = (CLOSED_LOOP, CLOSED_LOOP_DENSE)
    fixed = [(r["computed_fraction"], r["psnr_db"]) for r in results if r["series"] not in loops]
    if not fixed:
        return []
    fractions, decibels = zip(*best_settings(fixed), strict=True)
    leads = []
    for ours in (r for r in results if r["series"] in loops):
        rival = float(np.interp(ours["computed_fraction"], fractions, decibels))
        leads.append({"preset": ours["name"], "fixed_db": rival, "lead_db": ours["psnr_db"] - rival})
    return leads


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown, cheapest first within a series."""
    lines = [
        "| series | method | computed | PSNR dB | worst dB | SSIM | latent error |",
        "|---|---|---|---|---|---|---|",
    ]
    order = list(dict.fromkeys(result["series"] for result in results))
    for r in sorted(results, key=lambda r: (order.index(r["series"]), r["computed_fraction"])):
        lines.append(
            f"| {r['series']} | {r['name']} | {r['computed_fraction']:.3f} | {r['psnr_db']:.1f} "
            f"| {min(r['psnr_db_each']):.1f} | {r['ssim']:.4f} | {r['latent_error']:.4f} |"
        )
    return "\n".join(lines)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """What runs must have in common to be compared."""
    return {
        key: str(getattr(options, key)) for key in ("model", "prompts", "split", "steps", "height", "width", "dtype")
    }


def _earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of an earlier run, to which ``--only`` adds.

    Raises:
        SystemExit: that run had other settings.
    """
    file = options.output.with_suffix(".json")
    if not options.only or not file.exists():
        return []
    document = json.loads(file.read_text(encoding="utf-8"))
    if document["settings"] != _settings(options):
        raise SystemExit(f"{file} was measured with {document['settings']}; give the same settings or another --output")
    return document["results"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json, .md and .png files")
    parser.add_argument("--model", choices=list(PREFIXES), default="demo-flux")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    parser.add_argument("--variants", action="store_true", help="closed-loop thresholds instead of the presets")
    parser.add_argument("--steps", type=int, help="like --height and --width: the model's own by default")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only", nargs="*", help="names of methods to run; the others stay as an earlier file has them"
    )
    options = parser.parse_args()

    folder = demo_path(options.model)
    arguments = demo_arguments(folder)
    for option, key in (("steps", "num_inference_steps"), ("height", "height"), ("width", "width")):
        if getattr(options, option) is None:
            setattr(options, option, arguments[key])
        arguments[key] = getattr(options, option)

    listed = closed_loop_variants() if options.variants else methods(options.model)
    names = [name for _, name, _ in listed]
    unknown = set(options.only or ()) - set(names)
    if unknown:
        parser.error(f"--only names no method: {', '.join(sorted(unknown))}; there are: {', '.join(names)}")

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=getattr(torch, options.dtype)).to(
        options.device
    )
    pipe.set_progress_bar_config(disable=True)
    held_out = (prompts if options.model == "demo-flux" else clips).held_out_prompts(options.prompts, options.split)
    started = time.perf_counter()
    comparison = Comparison(pipe, arguments, held_out)
    results = [r for r in _earlier(options) if r["name"] in names]
    origin = describe_run(pipe.device)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for series, name, method in listed:
        if not options.only or name in options.only:
            results = [r for r in results if r["name"] != name] + [comparison.measure(series, name, method) | origin]
            r = results[-1]
            seconds = time.perf_counter() - started
            print(f"{seconds:6.0f} s  {name:32s} {r['computed_fraction']:.3f}  {r['psnr_db']:.1f} dB", flush=True)
            results.sort(key=lambda r: names.index(r["name"]))
            document = {"settings": _settings(options), "margins": margins(results), "results": results}
            options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    options.output.with_suffix(".md").write_text(table(results) + "\n", encoding="utf-8")
    frontier_plot(
        [(r["series"], r["computed_fraction"], r["psnr_db"]) for r in results], options.output.with_suffix(".png")
    )
    print(table(results))


if __name__ == "__main__":
    main()
