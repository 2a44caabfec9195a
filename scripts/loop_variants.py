#!/usr/bin/env python3
"""What else the closed loop could do: variants of it on the tuning prompts of a demo model, one change at a time.

Each variant runs at several targets; its gain is its PSNR over that of the loop as it is at the same computed
fraction, interpolated. The JSON file is written after every setting.

    python scripts/loop_variants.py --output docs/results/loop-variants-demo-flux       # minutes on a GPU
    python scripts/loop_variants.py --model demo-wan --output /tmp/wan --prompts 2 --only "no corrector"
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_models import clips, prompts
from demo_models.loading import load_demo
from loop_study.loop import Predictor, Variant, looped

from dit_accel import load_preset
from dit_accel.tools.bench.origin import describe_run
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.metrics import psnr
from dit_accel.tools.tune.runs import run_pipeline

PRESETS = {"demo-flux": "flux-balanced", "demo-wan": "any-video-balanced", "demo-hunyuan": "any-video-balanced"}
AS_IT_IS = "as it is"
FACTORS = (0.7, 1.4)  # of the preset's target
FACTORS_AS_IT_IS = (0.4, 0.7, 1.4, 2.8)


def variants(model: str) -> dict[str, Variant]:
    """By name, at the target of the model's preset."""
    preset = load_preset(PRESETS[model])
    schedule = preset.schedule
    base = Variant(schedule.target_error, schedule.error_in, schedule.warmup, beyond=preset.forecast.beyond)
    damped = replace(base, predictors=(*base.predictors, Predictor(1, damped=True)))
    damping = {
        "damping": damped,
        "damping of the second degree too": replace(damped, predictors=(*damped.predictors, Predictor(2, damped=True))),
        "damping, judged in hindsight": replace(damped, hindsight=True),
    }
    if preset.forecast.damping:
        damping = {"no damping": base, **damping}
        base = damping.pop("damping")

    def of_quantity(quantity: str) -> tuple[Predictor, ...]:
        return tuple(replace(predictor, quantity=quantity) for predictor in base.predictors)

    over_sigma = tuple(replace(predictor, coordinate="sigma") for predictor in base.predictors)
    least_squares = (Predictor(1, extra=1), Predictor(2, extra=1))
    other = "latents" if schedule.error_in == "output" else "output"
    in_latents = replace(base, error_in="latents")
    return {
        AS_IT_IS: base,
        "no corrector, power of the gap": replace(base, repay=0.0, growth="power"),
        "no corrector": replace(base, repay=0.0),
        "power of the gap": replace(base, growth="power"),
        "power fitted to two gaps": replace(base, growth="fitted"),
        f"error in {other}": replace(base, error_in=other),
        "error of the farthest forecast": replace(base, error_in="farthest", target_error=base.target_error / 2),
        "error in latents, over √(1 − σ)": replace(in_latents, amplified=0.5),
        "error in latents, over 1 − σ": replace(in_latents, amplified=1.0),
        **damping,
        "target over remaining sigma": replace(base, span=0.5),
        "gap at most a third of what remains": replace(base, end=3.0),
        "gap at most threefold the last": replace(base, ratio=3.0),
        "error at least half of what the last suggests": replace(base, steady=0.5),
        "what a gap leaves goes to the next": replace(base, carry=0.5),
        "target a unit of sigma": replace(base, rate=True),
        "three quarters corrected": replace(base, repay=0.75),
        "corrected by five quarters": replace(base, repay=1.25),
        "corrector of degree 2": replace(base, repay_degree=2),
        "corrector of degree 4": replace(base, repay_degree=4),
        "order up to 3": replace(base, predictors=(*base.predictors, Predictor(3))),
        "blend of two orders": replace(base, blend=1.0),
        **{f"{share:.0%} of the next degree": replace(base, beyond=share) for share in (0.0, 0.3, 0.5, 0.7)},
        "least squares too": replace(base, predictors=(*base.predictors, *least_squares)),
        "step or sigma": replace(base, predictors=(*base.predictors, *over_sigma)),
        "over sigma": replace(base, predictors=over_sigma),
        "clean picture": replace(base, predictors=of_quantity("clean")),
        "noise": replace(base, predictors=of_quantity("noise")),
        "sigma times output": replace(base, predictors=of_quantity("scaled")),
        "output or clean picture": replace(base, predictors=(*base.predictors, *of_quantity("clean"))),
        "error of the 90% token": replace(base, norm="token:0.9"),
        "error of the 99% token": replace(base, norm="token:0.99"),
        "error in the 4-norm": replace(base, norm="power:4"),
        "warm-up 1": replace(base, warmup=1),
        "warm-up 3": replace(base, warmup=3),
        "warm-up 4": replace(base, warmup=4),
        "decided a step late": replace(base, late=True),
    }


def generate(pipe: Any, arguments: dict[str, Any], prompt: Any) -> torch.Tensor:
    """Frames ``[…, 3, height, width]`` in 0..1."""
    return run_pipeline(pipe, arguments, prompt.prompt, prompt.seed)["frames"]


def gains(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By variant: dB over the loop as it is at equal computed fraction, of the mean and of the worst prompt.

    Settings beyond the fractions at which the loop as it is was measured have no rival and are left out.
    """
    rivals = sorted((r["computed_fraction"], r["psnr_db"], r["worst_db"]) for r in results if r["name"] == AS_IT_IS)
    fractions, *lines = (list(column) for column in zip(*rivals, strict=True))
    found = {}
    for name in dict.fromkeys(r["name"] for r in results):
        rows = [r for r in results if r["name"] == name and fractions[0] <= r["computed_fraction"] <= fractions[-1]]
        leads = [
            [r[key] - float(np.interp(r["computed_fraction"], fractions, line)) for r in rows]
            for key, line in zip(("psnr_db", "worst_db"), lines, strict=True)
        ]
        if rows:
            found[name] = {"mean_db": statistics.fmean(leads[0]), "worst_db": statistics.fmean(leads[1])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json file")
    parser.add_argument("--model", choices=list(PRESETS), default="demo-flux")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--size", type=int, help="pixels of a side; the model's own by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", help=f"names of variants; '{AS_IT_IS}' always runs")
    options = parser.parse_args()

    folder = demo_path(options.model)
    arguments = demo_arguments(folder)
    if options.size:
        arguments["height"] = arguments["width"] = options.size
    listed = variants(options.model)
    unknown = set(options.only or ()) - set(listed)
    if unknown:
        parser.error(f"--only names no variant: {', '.join(sorted(unknown))}; there are: {', '.join(listed)}")
    pipe = load_demo(options.model, "float32", options.device)
    tuning = (prompts if options.model == "demo-flux" else clips).held_out_prompts(options.prompts, "tuning")
    started = time.perf_counter()
    plain = [generate(pipe, arguments, prompt) for prompt in tuning]
    results: list[dict[str, Any]] = []
    for name, variant in listed.items():
        if options.only and name not in (AS_IT_IS, *options.only):
            continue
        for factor in FACTORS_AS_IT_IS if name == AS_IT_IS else FACTORS:
            setting = replace(variant, target_error=variant.target_error * factor)
            decibels, fractions = [], []
            for prompt, reference in zip(tuning, plain, strict=True):
                with looped(pipe, setting) as loop:
                    decibels.append(psnr(generate(pipe, arguments, prompt), reference))
                fractions.append(loop.fraction)
            results.append(
                {
                    "name": name,
                    "computed_fraction": statistics.fmean(fractions),
                    "psnr_db": statistics.fmean(decibels),
                    "worst_db": min(decibels),
                    "psnr_db_each": decibels,
                    "computed_fraction_each": fractions,
                    "setting": asdict(setting),
                }
            )
            r = results[-1]
            print(
                f"{time.perf_counter() - started:6.0f} s  {name:45s} {r['computed_fraction']:.3f} "
                f"{r['psnr_db']:.1f} dB, worst {r['worst_db']:.1f}",
                flush=True,
            )
            document = {
                "model": options.model,
                "arguments": arguments,
                "gains": gains(results),
                "origin": describe_run(pipe.device),
                "results": results,
            }
            options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, lead in gains(results).items():
        print(f"{name:45s} {lead['mean_db']:+.1f} dB, worst {lead['worst_db']:+.1f}")


if __name__ == "__main__":
    main()
