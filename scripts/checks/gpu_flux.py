"""FLUX.1-dev's transformer with random weights in every step mode on a GPU; part of scripts/checks/gpu.py."""

import statistics
from contextlib import ExitStack
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from dit_accel import accelerate_pipeline, accelerate_transformer, load_preset, restore_pipeline
from scripts.bench.kernels.gate import host_must_not_wait
from tests.tiny import tiny_inputs, tiny_pipeline

TEXT, SIDE = 512, 64  # 1024 x 1024 pixels: 64 x 64 tokens after packing
STEPS = 8
# A short run with every mode: FULL FULL UPDATE DISPATCH DISPATCH UPDATE DISPATCH FULL.
HEADS = load_preset("flux-flashomni-paper", schedule={"warmup": 2, "interval": 3}, reuse={"tau_q": 0.95, "ramp": 0.3})
LAYERS = load_preset("flux-taylorseer", schedule={"warmup": 2, "interval": 3})
OUTPUT = load_preset("exact", schedule={"warmup": 2, "interval": 3, "cooldown": 1})
BF16_BOUND = 5e-3  # relative L2 after four blocks; one H200 measured 3.4e-3, and 6.3e-3 from sparse to plain


def transformer(double: int, single: int, dtype: torch.dtype) -> FluxTransformer2DModel:
    """Build a model of FLUX.1-dev's width (24 heads of 128) with this number of blocks and seeded random weights."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = FluxTransformer2DModel(num_layers=double, num_single_layers=single, guidance_embeds=True)
        finally:
            torch.set_default_dtype(default)
    return model.eval().requires_grad_(False)


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Arguments of one image's call, except latents and timestep."""
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.zeros(SIDE * SIDE, 3, device="cuda", dtype=dtype)
    ids[:, 1] = torch.arange(SIDE, device="cuda").repeat_interleave(SIDE)
    ids[:, 2] = torch.arange(SIDE, device="cuda").repeat(SIDE)
    return {
        "encoder_hidden_states": torch.randn(1, TEXT, 4096, device="cuda", dtype=dtype, generator=generator),
        "pooled_projections": torch.randn(1, 768, device="cuda", dtype=dtype, generator=generator),
        "guidance": torch.full([1], 3.5, device="cuda", dtype=dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3, device="cuda", dtype=dtype),
        "return_dict": False,
    }


@torch.no_grad()
def denoise(model: FluxTransformer2DModel) -> list[torch.Tensor]:
    """Run a rectified-flow loop and return the transformer's output at every step."""
    dtype = model.dtype
    call, outputs = inputs(dtype), []
    latents = torch.randn(1, SIDE * SIDE, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    for timestep in timesteps():
        (velocity,) = model(hidden_states=latents.to(dtype), timestep=timestep.expand(1).to(dtype), **call)
        latents = latents - velocity.float() / STEPS
        outputs.append(velocity.float())
    return outputs


def timesteps() -> torch.Tensor:
    return torch.linspace(1.0, 1 / STEPS, STEPS, device="cuda")


def check_few_layers() -> list[dict[str, Any]]:
    """Compare attention and GEMMs in Triton, and as chosen by "auto", with the torch reference; bf16, at full width."""
    model = transformer(2, 2, torch.bfloat16)
    plain = denoise(model)
    rows = []
    for name, preset in (("heads", HEADS), ("heads, no tiles", load_preset(HEADS, **{"skip.policy": "none"}))):
        runs, reports = {}, {}
        for backend in ("reference", "triton", "auto"):
            changes = {"kernels": {"attention": backend, "gemm": backend}}
            acceleration = accelerate_transformer(model, preset, timesteps(), **changes)
            runs[backend] = denoise(model)
            reports[backend] = acceleration.report()
            acceleration.restore()
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
    model = transformer(19, 38, torch.bfloat16)
    denoise(model)
    plain = accelerate_transformer(model, "exact", timesteps())
    denoise(model)
    plain_ms = 1000 * statistics.median(step.seconds for step in plain.report().steps)
    plain.restore()
    rows = []
    for name, preset in (("output", OUTPUT), ("layer", LAYERS), ("head", HEADS)):
        acceleration = accelerate_transformer(model, preset, timesteps())
        denoise(model)  # compiles
        outputs = denoise(model)
        report = acceleration.report()
        acceleration.restore()
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
