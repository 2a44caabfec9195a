"""FLUX.1-dev's transformer with random weights in every step mode on a GPU; part of scripts/checks/gpu.py."""

import statistics
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from scripts.bench.kernels.gate import host_must_not_wait
from scripts.bench.model_speed.bench import Bench
from scripts.bench.model_speed.models import MODELS
from tests.tiny import tiny_inputs, tiny_pipeline

STEPS = 8
# A short run with every mode: FULL FULL UPDATE DISPATCH DISPATCH UPDATE DISPATCH FULL.
HEADS = load_preset("flux-flashomni-paper", schedule={"warmup": 2, "interval": 3}, reuse={"tau_q": 0.95, "ramp": 0.3})
LAYERS = load_preset("flux-taylorseer", schedule={"warmup": 2, "interval": 3})
OUTPUT = load_preset("exact", schedule={"warmup": 2, "interval": 3, "cooldown": 1})
BF16_BOUND = 5e-3  # relative L2 after four blocks; one H200 measured 3.4e-3, and 6.3e-3 from sparse to plain


def flux(double: int, single: int) -> Bench:
    """Build a model of FLUX.1-dev's width (24 heads of 128) with this number of blocks and seeded random weights."""
    build = partial(FluxTransformer2DModel, num_layers=double, num_single_layers=single, guidance_embeds=True)
    return Bench(replace(MODELS["flux"], build=build), "cuda")


def denoise(bench: Bench) -> list[torch.Tensor]:
    """Run a denoising loop and return the transformer's output at every step."""
    return [velocity.float() for velocity in bench.loop(STEPS)]


def check_few_layers() -> list[dict[str, Any]]:
    """Compare attention and GEMMs in Triton, and as chosen by "auto", with the torch reference; bf16, at full width."""
    bench = flux(2, 2)
    plain = denoise(bench)
    rows = []
    for name, preset in (("heads", HEADS), ("heads, no tiles", load_preset(HEADS, **{"skip.policy": "none"}))):
        runs, reports = {}, {}
        for backend in ("reference", "triton", "auto"):
            changes = {"kernels": {"attention": backend, "gemm": backend}}
            runs[backend] = denoise(accelerate_pipeline(bench, preset, **changes))
            reports[backend] = bench.dit_accel.report()
            restore_pipeline(bench)
        for backend in ("triton", "auto"):
            report = reports[backend]
            error = max(_distance(a, b) for a, b in zip(runs[backend], runs["reference"], strict=True))
            rows.append(
                {
                    "check": f"FLUX 2 + 2 blocks, {name}: {backend} against reference",
                    "error": error,
                    "bound": BF16_BOUND,
                    "effect_of_sparsity": max(_distance(a, b) for a, b in zip(runs[backend], plain, strict=True)),
                    "computed_fraction": report.computed_fraction,
                    "steps_by_mode": report.steps_by_mode,
                    "passed": error <= BF16_BOUND and not report.fallbacks and len(report.steps_by_mode) == 3,
                }
            )
    return rows


def check_full_size() -> list[dict[str, Any]]:
    """Check all 57 blocks: finite outputs, and milliseconds of each mode compared with a plain step."""
    bench = flux(19, 38)
    denoise(bench)
    denoise(accelerate_pipeline(bench, "exact"))
    plain_ms = 1000 * statistics.median(step.seconds for step in bench.dit_accel.report().steps)
    rows = []
    for name, preset in (("output", OUTPUT), ("layer", LAYERS), ("head", HEADS)):
        denoise(accelerate_pipeline(bench, preset))  # compiles
        outputs, report = denoise(bench), bench.dit_accel.report()
        by_mode: dict[str, list[float]] = {}
        for step in report.steps:
            by_mode.setdefault(step.mode, []).append(1000 * step.seconds)
        finite = all(bool(output.isfinite().all()) for output in outputs)
        rows.append(
            {
                "check": f"FLUX.1-dev size, 4608 tokens, level {name}",
                "plain_ms": plain_ms,
                "ms_by_mode": {mode: statistics.median(times) for mode, times in by_mode.items()},
                "computed_fraction": report.computed_fraction,
                "cache_gib": report.cache_bytes / 2**30,
                "passed": finite and not report.fallbacks and set(by_mode) == {"full", "update", "dispatch"},
            }
        )
    return rows


def check_no_host_wait() -> list[dict[str, Any]]:
    """Run whole DISPATCH steps of a pipeline, scheduler included, and fail if the host waits for the GPU."""
    rows = []
    for name, preset in (("output", OUTPUT), ("layer", LAYERS), ("head", HEADS)):
        pipe = accelerate_pipeline(tiny_pipeline("flux").to("cuda", torch.bfloat16), preset)
        call = {"steps": STEPS, "height": 256, "width": 256}
        pipe(**tiny_inputs("flux", **call))  # compiles, and gives the modes
        modes = [step.mode for step in pipe.dit_accel.report().steps]
        reason = None
        with ExitStack() as watched:

            def watch_next(pipe, index, timestep, tensors, modes=modes, watched=watched):
                watched.close()
                if modes[index + 1 : index + 2] == ["dispatch"]:
                    watched.enter_context(host_must_not_wait())
                return tensors

            try:
                pipe(**tiny_inputs("flux", **call, callback_on_step_end=watch_next))
            except RuntimeError as error:
                reason = str(error)
        restore_pipeline(pipe)
        passed = reason is None and "dispatch" in modes
        check = f"tiny FLUX pipeline, level {name}: no host wait in DISPATCH steps"
        rows.append({"check": check, "modes": modes, "reason": reason, "passed": passed})
    return rows


def check_flux() -> list[dict[str, Any]]:
    """Run all FLUX checks."""
    return check_no_host_wait() + check_few_layers() + check_full_size()


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
