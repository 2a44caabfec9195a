"""Checks that two processes run together, over gloo on the CPU: ``python -m tests.parallel_ranks FOLDER [CHECK …]``.
Each writes its results to ``FOLDER/RANK.json``; :mod:`tests.test_parallel` reads them. The ranks are forked, because
imports take much of the time. With ``RANKS_DEVICE=cuda`` in the environment each is spawned, has a GPU of its own, and
they use NCCL."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch.distributed import _functional_collectives as functional

from dit_accel import accelerate_pipeline, accelerate_transformer, parallelize_pipeline, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models import transformer
from dit_accel.models.driver import FamilyDriver
from dit_accel.models.families import known_family
from dit_accel.models.graphs.step_graphs import StepGraphs
from dit_accel.models.parallel.context_parallel import split_plan
from dit_accel.stages import sharing
from dit_accel.stages.decode import FusedDecode
from dit_accel.stages.vae import autoencoder_kl, causal
from tests.forked import run_checks, run_forked
from tests.models import tiny
from tests.models.fake_graph import RecordedGraph
from tests.tiny import redraw, tiny_output, tiny_pipeline

RANKS = 2
DEVICE = os.environ.get("RANKS_DEVICE", "cpu")
STEPS = 6
TILES = {"policy": "sparge", "steps": "all", "tau_kv": 0.9}
BLOCKS = {"size": 64}
CLIP_BLOCKS = {"size": 64, "token_order": "hilbert"}
PRESETS = {
    "exact": ("exact", {}),
    "balanced": ("balanced", {}),
    "layer": ("balanced", {"forecast": {"level": "layer"}}),
    "sparse": ("exact", {"skip": TILES, "blocks": BLOCKS}),
    "residual": ("exact", {"skip": TILES | {"refresh": 2, "residual": True, "probe_blocks": 1}, "blocks": BLOCKS}),
}
# Cases have every preset or kind of block, and each family with some of them.
SHARED = {
    "flux": ("exact", "balanced", "sparse", "residual"),
    "wan": ("balanced", "sparse"),
    "hunyuan": ("exact", "sparse"),
    "qwen-image": ("residual", "sparse"),
}
ODD = {"flux": ("balanced", "residual"), "wan": ("exact", "sparse"), "3 heads": ("balanced", "residual")}
FUSES = {"flux": ("layer", "exact"), "hunyuan": ("layer", "exact"), "minimax-h3": ("layer", "sparse")}
FUSES |= dict.fromkeys(("flux2", "wan", "qwen-image"), ("layer",))
GRAPHS = tuple(  # every two of family, preset and kind of block once
    (family, preset, "plain" if (preset == "exact") == (family != "wan") else "fused")
    for family in ("flux", "wan", "hunyuan")
    for preset in ("exact", "balanced")
)
INPUTS = {"flux": {"max_sequence_length": 36}, "qwen-image": {}, "wan": {}, "hunyuan": {}}
COLLECTIVES = {
    dist: ("all_to_all_single", "all_reduce", "all_gather", "broadcast"),
    functional: ("all_to_all_single", "all_gather_tensor"),
}
CHECKS: dict[str, Callable[[], dict]] = {}


def check(function: Callable[[], dict]) -> Callable[[], dict]:
    CHECKS[function.__name__] = function
    return function


def pipeline(name: str):
    """A tiny pipeline whose heads divide by two."""
    if name in tiny.PIPELINES:
        return tiny.pipeline(name).to(DEVICE)
    pipe = tiny_pipeline(name)
    config = {**pipe.transformer.config, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pipe.transformer = type(pipe.transformer).from_config(config).eval()
        redraw(pipe.transformer)
    return pipe.to(DEVICE)


def share_tokens(pipe, name: str) -> None:
    """Share tokens as a user would without our helper; an odd number of text tokens needs diffusers' uneven form."""
    transformer = pipe.transformer
    plan = split_plan(transformer, known_family(transformer))
    config = ContextParallelConfig(ulysses_degree=2, ulysses_anything=name == "qwen-image")
    with patch.object(torch.accelerator, "device_count", lambda: 2):
        transformer.enable_parallelism(config=config, cp_plan=plan)


def output(pipe, name: str, steps: int = STEPS, **arguments) -> torch.Tensor:
    if name in tiny.PIPELINES:
        return tiny.output(name, steps, **arguments)
    return tiny_output(pipe, name, steps=steps, **INPUTS.get(name, {}) | arguments)


def accelerate(pipe, preset: str, name: str, **more: str):
    base, overrides = PRESETS[preset]
    if preset == "sparse" and name in ("wan", "hunyuan"):
        overrides = overrides | {"blocks": CLIP_BLOCKS, "model": {"wan": "wan", "hunyuan": "hunyuan_video"}[name]}
    return accelerate_pipeline(pipe, base, **overrides, **more)


def compared(pipe, result: torch.Tensor, alone: torch.Tensor, modes: list[str]) -> dict:
    report, alone = pipe.dit_accel.report(), alone.to(result.device)
    return {
        "error": ((result - alone).norm() / alone.norm()).item(),
        "sum": result.double().sum().item(),
        "alone": modes,
        "modes": [step.mode for step in report.steps],
        "errors": [step.error for step in report.steps],
        "fallbacks": report.fallbacks,
        "computed": report.computed_fraction,
        "held": report.cache_bytes,
        "expected": report.estimated_bytes,
    }


def modes_of(pipe) -> list[str]:
    return [step.mode for step in pipe.dit_accel.report().steps]


def alone(pipe, name: str, presets: Sequence[str], **arguments) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """Outputs and modes by preset without parallelism, of which each rank computes a part for both."""
    original, parts = {}, [None] * RANKS
    for preset in presets[dist.get_rank() :: RANKS]:
        accelerate(pipe, preset, name)
        original[preset] = output(pipe, name, **arguments).cpu(), modes_of(pipe)
    dist.all_gather_object(parts, original)
    return {preset: part[preset] for preset in presets for part in parts if preset in part}


def both_orders(name: str) -> dict:
    """Presets on one device and on two: parallelism enabled after the acceleration, and before it."""
    found, last = {}, SHARED[name][-1]
    pipe = pipeline(name)
    expected = alone(pipe, name, SHARED[name])
    accelerate(pipe, last, name)
    share_tokens(pipe, name)
    found[f"{last}, accelerated first"] = compared(pipe, output(pipe, name), *expected[last])
    for preset in SHARED[name]:
        restore_pipeline(pipe)
        accelerate(pipe, preset, name)
        found[preset] = compared(pipe, output(pipe, name), *expected[preset])
    restore_pipeline(pipe)
    return found


CHECKS |= {name: partial(both_orders, name) for name in SHARED}


@check
def any_size() -> dict:
    """Numbers of tokens and of heads that two ranks can't divide."""
    latents = torch.randn(1, 16, 3, 6, 10, generator=torch.Generator().manual_seed(0))
    odd = {"flux": {"max_sequence_length": 37}, "wan": {"latents": latents}, "3 heads": {}}
    found = {}
    for name, arguments in odd.items():
        pipe, family = (tiny_pipeline("wan").to(DEVICE), "wan") if name == "3 heads" else (pipeline(name), name)
        expectations = alone(pipe, family, ODD[name], **arguments)
        parallelize_pipeline(pipe, ulysses=2)
        for preset, expected in expectations.items():
            accelerate(pipe, preset, family)
            with patch.object(dist, "all_gather", dist.all_gather if DEVICE == "cuda" else gathered_one_by_one):
                found[f"{name}, {preset}"] = compared(pipe, output(pipe, family, **arguments), *expected)
    return found


def gathered_one_by_one(parts: list[torch.Tensor], original: torch.Tensor, group=None) -> None:
    """Gather tensors of different sizes, as NCCL does and gloo does not."""
    for rank, part in enumerate(parts):
        if rank == dist.get_rank():
            part.copy_(original)
        dist.broadcast(part, rank, group=group)


@check
def fused() -> dict:
    """Use fused kernels in every step, as on a GPU: our code exchanges attention."""
    found = {}
    for name, presets in FUSES.items():
        pipe = pipeline(name)
        expectations = alone(pipe, name, presets)
        share_tokens(pipe, name)
        with patch.object(FamilyDriver, "fuses_kernels", lambda *_: True):
            for preset, expected in expectations.items():
                accelerate(pipe, preset, name)
                found[f"{name}, {preset}"] = compared(pipe, output(pipe, name), *expected)
    return found


@check
def graphs() -> dict:
    """The first rank replays its captures, cut where tokens are exchanged; the second runs without graphs."""
    found = {}
    pipes = {name: parallelize_pipeline(pipeline(name), ulysses=2) for name, *_ in GRAPHS}
    for name, preset, blocks in GRAPHS:
        pipe, counted = pipes[name], type("Counted", (RecordedGraph,), {})
        with (
            patch.object(FamilyDriver, "fuses_kernels", lambda *_, fuses=blocks == "fused": fuses),
            patch.object(transformer, "StepGraphs", partial(StepGraphs, graph=counted)),
        ):
            accelerate(pipe, preset, name, **{"kernels.graphs": "never"})
            expected = output(pipe, name)
            accelerate(pipe, preset, name, **{"kernels.graphs": "auto" if dist.get_rank() == 0 else "never"})
            outputs = [output(pipe, name) for _ in range(2)]
        found[f"{name}, {preset}, {blocks} blocks"] = {
            "equal": all(torch.equal(item, expected) for item in outputs),
            "parts": counted.parts,
            "replays": counted.replays,
            "notes": pipe.dit_accel.report().notes,
        }
    return found | {"after uneven calls": after_uneven_calls()}


def after_uneven_calls() -> dict:
    """Calls that can't be captured, and then others that can."""
    pipe, counted = parallelize_pipeline(pipeline("flux"), ulysses=2), type("Counted", (RecordedGraph,), {})
    notes = []
    with patch.object(transformer, "StepGraphs", partial(StepGraphs, graph=counted)):
        accelerate(pipe, "exact", "flux", **{"kernels.graphs": "always"})
        for tokens in (37, 36):
            output(pipe, "flux", max_sequence_length=tokens)
            notes.append(pipe.dit_accel.report().notes)
    return {"notes": notes, "replays": counted.replays}


@check
def silence() -> dict:
    """Exchanges by step of a run whose forecast steps run no block."""
    pipe, exchanges, count = pipeline("wan"), [], [0]
    parallelize_pipeline(accelerate_pipeline(pipe, "balanced"), ulysses=2)

    def counting(function: Callable, *args, **kwargs):
        count[0] += 1
        return function(*args, **kwargs)

    def end(*_) -> dict:
        exchanges.append(count[0])
        count[0] = 0
        return {}

    with ExitStack() as stack:
        for module, names in COLLECTIVES.items():
            for name in names:
                stack.enter_context(patch.object(module, name, partial(counting, getattr(module, name))))
        output(pipe, "wan", callback_on_step_end=end)
    return {"modes": modes_of(pipe), "exchanges": exchanges}


@check
def rounding() -> dict:
    """Ranks whose outputs differ, more than rounding would make them."""
    pipe = pipeline("flux")
    parallelize_pipeline(accelerate_pipeline(pipe, "balanced"), ulysses=2)
    noise = torch.Generator().manual_seed(dist.get_rank())
    pipe.transformer.proj_out.register_forward_hook(
        lambda _, __, result: result * (1 + 0.05 * torch.randn(result.shape, generator=noise))
    )
    output(pipe, "flux")
    report = pipe.dit_accel.report()
    return {"modes": modes_of(pipe), "errors": [step.error for step in report.steps]}


@check
def level_head() -> dict:
    """FlashOmni's preset, which can't run where tokens are shared."""
    pipe = pipeline("flux")
    parallelize_pipeline(pipe, ulysses=2)
    exact = output(accelerate(pipe, "exact", "flux"), "flux")
    accelerate_pipeline(pipe, "flux-flashomni-paper", **{"schedule.warmup": 1})
    return compared(pipe, output(pipe, "flux"), exact, [])


@check
def exception() -> dict:
    """A run that every rank leaves in its middle, and the next one."""
    pipe = pipeline("wan")
    parallelize_pipeline(accelerate_pipeline(pipe, "balanced"), ulysses=2)
    fresh, modes = output(pipe, "wan"), modes_of(pipe)
    leave = Mock(side_effect=[{}] * 4 + [KeyboardInterrupt])
    with suppress(KeyboardInterrupt):
        output(pipe, "wan", callback_on_step_end=leave)
    return compared(pipe, output(pipe, "wan"), fresh, modes)


@check
def branches() -> dict:
    """The prompt's branch on one rank and that without it on the other."""
    found = {}
    guided = {"negative_prompt": "rain", "true_cfg_scale": 3.0}
    cases = {
        "wan": ({}, ("exact", "balanced", "layer", "residual")),
        "flux": (guided, ("balanced",)),
        "qwen-image": (guided, ("balanced",)),
    }
    for name, (arguments, presets) in cases.items():
        pipe, calls = pipeline(name), []
        pipe.transformer.proj_out.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        alone = {}
        for preset in presets:
            calls.clear()
            accelerate(pipe, preset, name)
            alone[preset] = output(pipe, name, **arguments), modes_of(pipe), len(calls)
        parallelize_pipeline(pipe, branches=2)
        for preset, (expected, modes, plain_calls) in alone.items():
            calls.clear()
            accelerate(pipe, preset, name)
            row = compared(pipe, output(pipe, name, **arguments), expected, modes)
            found[f"{name}, {preset}"] = row | {"calls": len(calls), "plain_calls": plain_calls}
    return found


@check
def branch_kinds() -> dict:
    """Runs of one pipeline whose outputs have the same shapes and differ in their dtype, under one acceleration."""
    found, alone, pipe = {}, pipeline("wan"), parallelize_pipeline(pipeline("wan"), branches=2)
    accelerate_pipeline(alone, "exact"), accelerate_pipeline(pipe, "exact")
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        alone.transformer.to(dtype), pipe.transformer.to(dtype)
        expected = output(alone, "wan")
        found[f"{len(found)}: {dtype}"] = compared(pipe, output(pipe, "wan"), expected, modes_of(alone))
    return found


@check
def branches_per_prompt() -> dict:
    """Prompts of a batch that decide by themselves, of which a step may compute some."""
    inputs = {"prompt": ["a cat", "a dog that runs across a field of yellow flowers"]}
    alone, pipe = pipeline("wan"), parallelize_pipeline(pipeline("wan"), branches=2)
    calls = [], []
    for item, noted in zip((alone, pipe), calls, strict=True):
        accelerate_pipeline(item, "balanced", **{"schedule.per_prompt": True})
        item.transformer.proj_out.register_forward_hook(lambda *_, noted=noted: noted.append(1))
    expected = output(alone, "wan", **inputs)
    row = compared(pipe, output(pipe, "wan", **inputs), expected, modes_of(alone))
    return row | {"plain_calls": len(calls[0]), "calls": len(calls[1])}


@check
def branch_called_twice() -> dict:
    """A loop of the user's own that calls for one branch twice in a step before it reads any output."""
    texts = [torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    x = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for ranks in (1, 2):
        pipe = pipeline("wan")
        if ranks > 1:
            parallelize_pipeline(pipe, branches=2)
        accelerate_transformer(pipe.transformer, "exact", [900.0, 800.0, 700.0])
        found.append([])
        for timestep in (900.0, 800.0, 700.0):
            outputs = []
            for branch, text in zip(("cond", "uncond", "cond"), texts, strict=True):
                with pipe.transformer.cache_context(branch):
                    inputs = {"hidden_states": x, "timestep": torch.tensor([timestep]), "encoder_hidden_states": text}
                    outputs.append(pipe.transformer(**inputs, return_dict=False)[0])
            found[-1] += [item.double().sum().item() for item in outputs]
    return {"alone": found[0], "shared": found[1]}


@check
def refusals() -> dict:
    """Errors of unsupported combinations."""
    found = {}
    wrong = {"count": ("wan", {"ulysses": 4}), "plan": ("sd3", {"ulysses": 2}), "heads": ("wan", {"ulysses": 2})}
    for case, (name, degrees) in (wrong | {"twice": ("wan", {"branches": 2})}).items():
        pipe = pipeline(name)
        if case == "heads":
            pipe.transformer.register_to_config(num_attention_heads=1)
        if case == "twice":
            parallelize_pipeline(pipe, ulysses=2)
        try:
            parallelize_pipeline(pipe, **degrees)
        except UnsupportedError as error:
            found[case] = str(error)
    return found


@check
def decoding() -> dict:
    """Ranks share the latents that a pipeline decodes, not a preview that the first rank decodes in a callback."""
    found = {}
    for name in ("flux", "wan"):
        pipe = parallelize_pipeline(pipeline(name), ulysses=2)
        videos, remarks, previews = [], [], []

        def preview(pipe, *_, previews=previews):
            if dist.get_rank() == 0:
                shape = (1, pipe.vae.config.z_dim, 1, 4, 4) if name == "wan" else (2, 4, 4, 4)  # noqa: B023
                pipe.vae.decode(torch.zeros(shape, device=DEVICE))
                previews.append(FusedDecode.on(pipe.vae).remark)
            return {}

        for share in (True, False):
            accelerate_pipeline(pipe, "exact", **{"stages.share": share})
            if DEVICE == "cpu":
                FusedDecode.on(pipe.vae)._backend = "reference"
            for call in range(2):
                inputs = {"output_type": "pt", "callback_on_step_end": preview if call else None}
                with (
                    patch.object(sharing, "LEAST_ROWS", 1),
                    patch.object(autoencoder_kl, "SHARED_FROM", 1),
                    patch.object(causal, "SHARED_FROM", 1),
                ):
                    videos.append(output(pipe, name, steps=2, **inputs))
                remarks.append(pipe.dit_accel.report().decoding)
        errors = [(item - videos[-1]).abs().max().item() for item in videos]
        found[name] = {"errors": errors, "remarks": remarks, "previews": sorted(set(previews))}
    return found


@check
def speed_script() -> dict:
    """The benchmark of several GPUs, at toy size."""
    from scripts.bench import ranks

    argv = ["ranks", "--smoke", "--models", "flux", "--output", str(Path(sys.argv[1]) / "speed")]
    with patch.object(sys, "argv", argv), patch.object(ranks, "STEPS", 20):
        return {"code": ranks.main()}


def run(rank: int) -> None:
    """Run the checks as one rank."""
    chosen = sys.argv[2:] or [name for name in CHECKS if name != "speed_script"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    warnings.simplefilter("ignore")
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    run_checks(rank, RANKS, lambda: {name: CHECKS[name] for name in chosen}, "nccl" if DEVICE == "cuda" else "gloo")


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.multiprocessing.spawn(run, nprocs=RANKS)
    else:
        sys.exit(run_forked(RANKS, run))
