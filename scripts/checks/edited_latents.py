"""Edit latents during runs, once or at every step, and compare accelerated runs with baselines that get the same edits.

    python -m scripts.checks.edited_latents --output docs/results/edited-latents --device cuda --dtype bfloat16

Relative L2 errors of the last latents. A run whose latents are replaced once is also compared with a run whose caches a
callback drops at that step.
"""

import argparse
import inspect
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import torch

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.measure.origin import describe_run
from scripts.demo_training.loading import load_demo
from scripts.tables import as_json, write_table

Edit = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]  # step, noised other latents, latents -> latents
ONCE = [(3, 0, 1), (6, 0, 0.5), (10, 0, 1), (10, 0.45, 0.55), (14, 0.5, 1), (22, 0, 0.3), (30, 0, 1), (30, 0.2, 0.3)]
ONCE += [(37, 0, 0.5), (45, 0, 1), (45, 0.5, 0.6)]  # step of 50, and the region: shares of the tokens in raster order
PROMPTS = ["a yellow ring", "two pink stars over the sea at sunset"]
MOVING = ["a red ball bounces", "a blue square moves to the right"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json and .md files")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["demo-flux", "demo-wan"])
    parser.add_argument("--presets", nargs="+", default=["quality", "balanced", "turbo"])
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 28])
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 3.0])
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    rows = []
    for model in options.models:
        pipe = load_demo(model, options.dtype, options.device)
        for steps, guidance in product(options.steps, options.guidance):
            for row in measured(pipe, model, steps, guidance, options.presets):
                rows.append({"model": model, "steps": steps, "guidance": guidance, **row})
                print(json.dumps(rows[-1]), flush=True)
    result = describe_run(options.device) | {"dtype": options.dtype, "rows": rows}
    options.output.with_suffix(".json").write_text(as_json(result), encoding="utf-8")
    write_table(options.output.with_suffix(".md"), table(rows))


def measured(pipe: Any, model: str, steps: int, guidance: float, presets: list[str]) -> list[dict[str, Any]]:
    """Rows of one model, number of steps and guidance scale."""
    prompt, second = MOVING if model == "demo-wan" else PROMPTS
    names = inspect.signature(pipe.__call__).parameters
    arguments = {key: value for key, value in demo_arguments(demo_path(model)).items() if key in names}
    arguments |= {"num_inference_steps": steps, "output_type": "latent", "negative_prompt": "blurred"}
    arguments |= {"true_cfg_scale" if "true_cfg_scale" in names else "guidance_scale": guidance, "return_dict": False}

    def run(text: str, seed: int, edit: Edit | None = None, drop_at: int | None = None) -> torch.Tensor:
        def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == drop_at:
                pipe.dit_accel.reset()
            if edit is None:
                return {}
            sigma, latents = float(pipe.scheduler.sigmas[step + 1]), tensors["latents"]
            return {"latents": edit(step, (1 - sigma) * other + sigma * noise, latents).to(latents.dtype)}

        generator = torch.Generator("cpu").manual_seed(seed)
        return pipe(**arguments | {"prompt": text}, generator=generator, callback_on_step_end=change)[0].float()

    other = run(second, 5)
    noise = torch.randn(other.shape, generator=torch.Generator().manual_seed(6)).to(other)
    tokens = other.shape[1:2] if other.ndim == 3 else other.shape[2:]  # [B, tokens, C] or [B, C, …]
    place = torch.arange(tokens.numel(), device=other.device) / tokens.numel()
    place = place[:, None] if other.ndim == 3 else place.view(tokens)
    rows = []
    for name, (edit, at) in edits(place, steps).items():
        baseline = run(prompt, 1, edit)
        for preset in presets:
            accelerate_pipeline(pipe, preset)
            row: dict[str, Any] = {"edit": name, "preset": preset}
            for key, drop_at in (("error", None), ("error_dropped", at)):
                if key == "error" or at is not None:
                    found = run(prompt, 1, edit, drop_at)
                    row[key] = round(((found - baseline).norm() / baseline.norm()).item(), 5)
                row.setdefault("computed", pipe.dit_accel.report().computed_fraction)
            row["notes"] = pipe.dit_accel.report().notes if at is None else []
            rows.append(row)
            restore_pipeline(pipe)
    return rows


def edits(place: torch.Tensor, steps: int) -> dict[str, tuple[Edit | None, int | None]]:
    """Return edits by name, with the step of those that happen once; ``place`` is each token's share of the raster."""

    def paste(region: Callable[[int], torch.Tensor]) -> Edit:
        return lambda step, other, latents: torch.where(region(step), other, latents)

    found: dict[str, tuple[Edit | None, int | None]] = {"none": (None, None)}
    for fiftieth, start, end in ONCE:
        at = max(1, round(fiftieth * steps / 50))
        region = (place >= start) & (place < end)
        found[f"{end - start:.0%} replaced after step {at}"] = (
            paste(lambda step, at=at, region=region: region & (step == at)),
            at,
        )
    half = place < 0.5
    return found | {
        "half pasted at every step": (paste(lambda step: half), None),
        "half pasted until 60%": (paste(lambda step: half & (step < 0.6 * steps)), None),
        "half pasted from 40%": (paste(lambda step: half & (step > 0.4 * steps)), None),
        "differential, from the top": (paste(lambda step: place > (step + 1) / steps), None),
        "differential, from the bottom": (paste(lambda step: 1 - place > (step + 1) / steps), None),
        "half blended by 10%": (lambda step, other, latents: latents + 0.1 * half * (other - latents), None),
        "clamped": (lambda step, other, latents: latents.clamp(-2.5, 2.5), None),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | steps | guidance | preset | edit | error | with caches dropped | computed |", "|" + "---|" * 8]
    for row in rows:
        dropped = f"{row['error_dropped']:.3f}" if "error_dropped" in row else ""
        figures = f"{row['error']:.3f} | {dropped} | {row['computed']:.2f}"
        lines.append(
            f"| {row['model']} | {row['steps']} | {row['guidance']:g} | {row['preset']} | {row['edit']} | {figures} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
