"""Run every preset on the tiny pipelines and the demo models in two checkouts, and compare outputs bit for bit.

    python -m scripts.checks.checkouts BEFORE AFTER --output comparison.json      # folders of two checkouts; on a CPU
    python -m scripts.checks.checkouts BEFORE AFTER --output comparison.json --only flux,demo-wan --steps 12

The presets are the shipped ones of BEFORE that fit a pipeline. Each checkout runs in its own process with the packages
of the Python that runs this script. Exits with 1 if any output differs.
"""

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.tables import as_json

DEMO_MODELS = ("demo-flux", "demo-wan", "demo-hunyuan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", help="tiny pipelines and demo models, comma-separated; default: all")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for side in ("before", "after"):
        job = {"steps": options.steps, "only": options.only.split(",") if options.only else None}
        if side == "after":
            job["runs"] = {model: list(runs) for model, runs in results["before"].items()}
        environment = {**os.environ, "PYTHONPATH": str(getattr(options, side).resolve()), "OMP_NUM_THREADS": "2"}
        command = [sys.executable, __file__, "--run", json.dumps(job)]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{side} failed:\n{done.stderr[-4000:]}")
        results[side] = json.loads(done.stdout.splitlines()[-1])
    differing = []
    for model, runs in results["before"].items():
        wrong = [name for name, run in runs.items() if results["after"][model][name] != run]
        differing += [f"{model} {name}" for name in wrong]
        print(f"| {model} | {len(runs)} | {len(runs) - len(wrong)} | {', '.join(wrong) or '–'} |")
    options.output.write_text(as_json({"differing": differing, **results}))
    sys.exit(bool(differing))


def run(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Run every preset on every model of this checkout: a digest by model and preset, or the name of the error."""
    testing = _module("tests.tiny", "dit_accel.tools.testing")
    models = list(job.get("runs", job["only"] or [*testing.TINY_PIPELINES, *DEMO_MODELS]))
    results: dict[str, dict[str, Any]] = {}
    for model in models:
        pipe, call = _pipeline(model, job["steps"], testing)
        presets = ["none", *_fitting(pipe)] if "runs" not in job else job["runs"][model]
        results[model] = {preset: _digest(pipe, call, preset) for preset in presets}
        print(model, len(presets), file=sys.stderr, flush=True)
    return results


def _pipeline(model: str, steps: int, testing: Any) -> tuple[Any, Any]:
    """Return the pipeline, and a function that always calls it with the same arguments."""
    import torch
    from diffusers import DiffusionPipeline

    if model not in DEMO_MODELS:
        return testing.tiny_pipeline(model), lambda pipe: pipe(**testing.tiny_inputs(model, steps=steps))[0]
    demo = _module("dit_accel.tools.demo", "dit_accel.demo")
    folder = demo.demo_path(model)
    arguments = {**demo.demo_arguments(folder), "num_inference_steps": steps, "output_type": "latent"}
    if model == "demo-flux":
        arguments |= {"height": 256, "width": 256}
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    prompt = demo.tuning_prompts(model)[0]
    return pipe, lambda pipe: pipe(prompt, generator=torch.Generator().manual_seed(0), **arguments)[0]


def _fitting(pipe: Any) -> list[str]:
    """Names of the shipped presets that fit this pipeline."""
    from dit_accel import accelerate_pipeline, preset_names, restore_pipeline
    from dit_accel.errors import DitAccelError

    fitting = []
    for name in preset_names():
        try:
            accelerate_pipeline(pipe, name)
        except DitAccelError:
            continue
        restore_pipeline(pipe)
        fitting.append(name)
    return fitting


def _digest(pipe: Any, call: Any, preset: str) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree as pytree

    from dit_accel import accelerate_pipeline, restore_pipeline

    torch.manual_seed(0)
    try:
        if preset != "none":
            accelerate_pipeline(pipe, preset)
        output = call(pipe)
        hashed = hashlib.sha256()
        for tensor in [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output):
            hashed.update(tensor.contiguous().numpy().tobytes())
        digest = {"output": hashed.hexdigest()[:16]}
        if preset != "none":
            report = pipe.dit_accel.report()
            digest["steps"] = "".join(step.mode[0] for step in report.steps)
            digest["computed"] = report.computed_fraction
            digest["errors"] = [step.error for step in report.steps]
        return digest
    except Exception as error:
        return {"error": type(error).__name__}
    finally:
        restore_pipeline(pipe)


def _module(*names: str) -> Any:
    """Import the first of these modules that the checkout has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {', '.join(names)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(run(json.loads(sys.argv[2]))))
    else:
        main()
