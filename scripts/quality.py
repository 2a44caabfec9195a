#!/usr/bin/env python3
"""Quality of every preset and of the fixed schedules beside them, on held-out prompts of the demo model.

Each run is compared with the plain run of the same prompt and seed. Writes a JSON file, a Markdown table and a plot.

    python scripts/quality.py --output docs/results/quality-demo-flux                 # 10 prompts, minutes on a GPU
    python scripts/quality.py --output /tmp/quality --prompts 1 --height 256 --width 256 --only flux-balanced

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
from demo_models.prompts import held_out_prompts

from dit_accel import accelerated, load_preset, preset_names
from dit_accel.bench.origin import describe_run
from dit_accel.demo import demo_arguments, demo_path
from dit_accel.metrics import latent_error, psnr, ssim
from dit_accel.presets import Preset
from dit_accel.visualize import best_settings, frontier_plot

CLOSED_LOOP = "closed loop (ours)"


def methods() -> list[tuple[str, str, Preset | int]]:
    """(series, name, preset or number of steps) of everything that is compared."""
    listed: list[tuple[str, str, Preset | int]] = []
    for name in preset_names():
        # The any-* presets are the flux-* ones for other models, and give the same pictures here.
        if name != "exact" and not name.startswith("any-"):
            listed.append((_series(name, load_preset(name)), name, load_preset(name)))
    settings = [*itertools.product((3, 8), (1, 2), (3, 4, 5, 6)), (3, 1, 7), (3, 1, 8)]
    for warmup, order, interval in settings:
        changes = {"schedule": {"warmup": warmup, "interval": interval}, "forecast": {"order": order}}
        label = f"W={warmup} N={interval} D={order}"
        listed.append(("TaylorSeer", f"TaylorSeer {label}", load_preset("flux-taylorseer", **changes)))
        whole = load_preset("exact", **changes, **{"schedule.final_full": 1})
        listed.append(("fixed interval, stack", f"stack {label}", whole))
    for warmup, interval in itertools.product((3, 8), (3, 4, 5, 6)):
        changes = {"schedule": {"warmup": warmup, "interval": interval}}
        listed.append(("FORA", f"FORA W={warmup} N={interval}", load_preset("flux-fora", **changes)))
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
        return CLOSED_LOOP
    return {"flux-taylorseer": "TaylorSeer", "flux-fora": "FORA"}.get(name, "FlashOmni")


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
            figures["psnr_db"].append(psnr(result["picture"], plain["picture"]))
            figures["ssim"].append(ssim(result["picture"], plain["picture"]))
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
        generator = torch.Generator("cpu").manual_seed(prompt.seed)
        call = {**self._arguments, **changes, "prompt": prompt.prompt, "generator": generator, "output_type": "latent"}
        latents = self._pipe(**call)[0]
        return {"latents": latents.float().cpu(), "picture": self._decode(latents)}

    @torch.no_grad()
    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Packed latents to a float picture ``[3, height, width]`` in 0..1, as the pipeline's own last lines do."""
        pipe, vae = self._pipe, self._pipe.vae
        unpacked = pipe._unpack_latents(
            latents, self._arguments["height"], self._arguments["width"], pipe.vae_scale_factor
        )
        unpacked = unpacked / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(unpacked, return_dict=False)[0][0].float() / 2 + 0.5).clamp(0, 1).cpu()


def margins(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each closed-loop preset's lead in dB over the fixed schedules at its own computed fraction.

    The rival is the frontier of all that is not closed loop, interpolated linearly between its two nearest settings.
    """
    fixed = [(r["computed_fraction"], r["psnr_db"]) for r in results if r["series"] != CLOSED_LOOP]
    if not fixed:
        return []
    fractions, decibels = zip(*best_settings(fixed), strict=True)
    leads = []
    for ours in (r for r in results if r["series"] == CLOSED_LOOP):
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
    return {key: str(getattr(options, key)) for key in ("prompts", "split", "steps", "height", "width", "dtype")}


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
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    parser.add_argument("--variants", action="store_true", help="closed-loop thresholds instead of the presets")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only", nargs="*", help="names of methods to run; the others stay as an earlier file has them"
    )
    options = parser.parse_args()

    listed = closed_loop_variants() if options.variants else methods()
    names = [name for _, name, _ in listed]
    unknown = set(options.only or ()) - set(names)
    if unknown:
        parser.error(f"--only names no method: {', '.join(sorted(unknown))}; there are: {', '.join(names)}")

    folder = demo_path("demo-flux")
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=getattr(torch, options.dtype)).to(
        options.device
    )
    pipe.set_progress_bar_config(disable=True)
    sizes = {"height": options.height, "width": options.width, "num_inference_steps": options.steps}
    prompts = held_out_prompts(options.prompts, split=options.split)
    started = time.perf_counter()
    comparison = Comparison(pipe, {**demo_arguments(folder), **sizes}, prompts)
    results = [r for r in _earlier(options) if r["name"] in names]
    origin = describe_run(pipe.device)
    for series, name, method in listed:
        if not options.only or name in options.only:
            results = [r for r in results if r["name"] != name] + [comparison.measure(series, name, method) | origin]
            r = results[-1]
            seconds = time.perf_counter() - started
            print(f"{seconds:6.0f} s  {name:32s} {r['computed_fraction']:.3f}  {r['psnr_db']:.1f} dB", flush=True)

    results.sort(key=lambda r: names.index(r["name"]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"settings": _settings(options), "margins": margins(results), "results": results}
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(table(results) + "\n", encoding="utf-8")
    frontier_plot(
        [(r["series"], r["computed_fraction"], r["psnr_db"]) for r in results], options.output.with_suffix(".png")
    )
    print(table(results))


if __name__ == "__main__":
    main()
