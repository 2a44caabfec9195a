"""Small models of transformer classes: pipelines of a checkout of diffusers, or a transformer in a loop of its own."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.models.embeddings import TimestepEmbedding
from torch.utils import _pytree as pytree

from dit_accel import accelerate_pipeline, accelerate_transformer, restore_pipeline
from dit_accel.models.families.family import FURTHER_LATENTS, TIMESTEPS, latents_of
from dit_accel.models.session import predictions
from scripts.checks.class_study.small import SMALL
from tests.tiny import redraw, smooth_in_time

STEPS = 16
PRESETS = {  # how each kind accelerates
    "exact": {"preset": "exact"},
    "balanced": {"preset": "balanced"},
    "forecast": {"preset": "balanced", "schedule": {"control": "interval", "warmup": 3, "interval": 2}},
}
PROMPTS = ["a red fox in the winter snow", "two boats on a lake"]
NEGATIVE = "a grey wall"
PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
GUIDANCE = {"guidance_scale": 2.0, "true_cfg_scale": 2.0}
TESTS = "diffusers_tests"  # name of the checkout's package `tests`, which differs from ours
LAST = ("controlnet", "pag", "lora")  # pipelines that are tried after all others


class NotRun(Exception):
    """A model that can't be made or run plainly; the text is the reason."""


@dataclass
class Case:
    """A small model, and how it runs; `title` is the class of the pipeline, or `alone`.

    `run` makes outputs for a batch of 1 or 2, or raises `NotRun`. `accelerate` takes one of `PRESETS`, and returns two
    functions: of the report, and to restore the model.
    """

    title: str
    transformers: list[torch.nn.Module]
    run: Callable[[int], list[torch.Tensor]]
    accelerate: Callable[[str], tuple[Callable[[], Any], Callable[[], Any]]]


def tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors, arrays and images of an output, in float64."""
    found = []
    for leaf in pytree.tree_leaves(list(output.values()) if isinstance(output, dict) else output):
        if not isinstance(leaf, (torch.Tensor, np.ndarray)) and not hasattr(leaf, "getpixel"):
            continue
        leaf = leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf))
        found.append(leaf.detach().double())
    if not found:
        raise NotRun("its output has no tensor")
    return found


def of_pipeline(pipe: Any, call: Callable[[int], Any], title: str | None = None) -> Case:
    """A case of a pipeline; `call` calls it with a batch, and returns its outputs as a tuple."""

    def accelerate(kind: str) -> tuple:
        accelerate_pipeline(pipe, **PRESETS[kind])
        return pipe.dit_accel.report, lambda: restore_pipeline(pipe)

    found = [part for part in pipe.components.values() if is_denoiser(part)]
    return Case(title or type(pipe).__name__, found, lambda batch: tensors(call(batch)), accelerate)


def is_denoiser(part: Any) -> bool:
    return isinstance(part, torch.nn.Module) and hasattr(diffusers.models.transformers, type(part).__name__)


def first_that_runs(
    call: Callable[..., Any], candidates: Callable[[int], list[dict[str, Any]]]
) -> Callable[[int], Any]:
    """Return a function that calls with the first of the `candidates` for a batch with which the first call worked."""
    chosen: dict[int, int] = {}

    def run(batch: int) -> Any:
        if batch in chosen:
            return call(**candidates(batch)[chosen[batch]])
        failed: Exception = NotRun("its inputs hold one sample")
        for place in range(len(candidates(batch))):
            try:
                output = call(**candidates(batch)[place])
            except Exception as error:
                failed = error
                continue
            chosen[batch] = place
            return output
        raise failed

    return run


# Pipelines of a checkout.


def link(checkout: Path, folder: Path) -> None:
    """Make the checkout's package `tests` importable under another name than our own."""
    (folder / TESTS).symlink_to(checkout / "tests", target_is_directory=True)
    sys.path.insert(0, str(folder))
    for name in ("pipelines", "pipelines.test_pipelines_common"):  # some tests name these in full
        sys.modules[f"tests.{name}"] = importlib.import_module(f"{TESTS}.{name}")


def pipelines(checkout: Path, name: str) -> Iterator[Callable[[], Case]]:
    """Yield makers of pipelines whose tests name a transformer class, the usual ones first."""
    for file in _files(checkout / "tests" / "pipelines", name):
        yield from (partial(_pipeline, kind) for kind in _test_classes(checkout, file, "get_dummy_components"))


def _files(folder: Path, name: str) -> list[Path]:
    files = [file for file in folder.rglob("test_*.py") if re.search(rf"\b{name}\b", file.read_text())]
    return sorted(files, key=lambda file: (any(item in str(file.relative_to(folder)) for item in LAST), str(file)))


def _test_classes(checkout: Path, file: Path, method: str) -> list[type]:
    """Return the classes of a file of tests that have a method; print why if the file can't be imported."""
    name = ".".join([TESTS, *file.relative_to(checkout / "tests").with_suffix("").parts])
    try:
        module = importlib.import_module(name)
    except Exception as error:
        print(f"{file}: {type(error).__name__}: {error}", file=sys.stderr)
        return []
    return [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == name and hasattr(kind, method)
    ]


def _pipeline(kind: type) -> Case:
    tests = kind("run") if "methodName" in inspect.signature(kind).parameters else kind()
    if hasattr(tests, "setUp"):
        tests.setUp()
    pipe = tests.pipeline_class(**tests.get_dummy_components())
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
        if is_denoiser(part):
            redrawn(part)
    named = inspect.signature(pipe.__call__).parameters
    guidance: dict[str, Any] = {item: value for item, value in GUIDANCE.items() if item in named}
    if "true_cfg_scale" in guidance:
        guidance["negative_prompt"] = NEGATIVE

    def candidates(batch: int) -> list[dict[str, Any]]:
        """With guidance and latents, if the pipeline can; else with the arguments of its tests."""
        found = []
        for more in ({**guidance, "output_type": "latent"}, guidance, {}):
            arguments = {**tests.get_dummy_inputs("cpu"), **more, "return_dict": False}
            if "num_inference_steps" in named:
                arguments["num_inference_steps"] = STEPS
            found += [{**arguments, **item} for item in batches(arguments, named, batch)]
        return found

    return of_pipeline(pipe, first_that_runs(pipe, candidates))


def batches(arguments: dict[str, Any], named: Collection[str], batch: int) -> list[dict[str, Any]]:
    """Return changes of the call's arguments that make a batch: of different prompts or embeddings, else of several
    outputs.
    """
    if batch == 1:
        return [{}]
    found = []
    if isinstance(arguments.get("prompt"), str):
        prompts = {"prompt": PROMPTS}
        if isinstance(arguments.get("negative_prompt"), str):
            prompts["negative_prompt"] = [NEGATIVE] * batch
        images = {name: [arguments[name]] * batch for name in ("image", "images") if name in arguments}
        found += [prompts, prompts | images]
    elif "class_labels" in arguments:
        found.append({"class_labels": [*arguments["class_labels"], 7]})
    else:
        found.append({name: value for name, value in map(_twice, arguments, arguments.values()) if value is not None})
    return found + [{name: batch} for name in PER_PROMPT if name in named]


def _twice(name: str, value: Any) -> tuple[str, Any]:
    """Embeddings or a mask, and behind it the same with its tokens in reverse order; None for other arguments."""
    if "prompt" not in name or not isinstance(value, torch.Tensor | list):
        return name, None
    if isinstance(value, list):
        return name, [*value, *(item.flip(0) for item in value)]
    return name, torch.cat([value, value.flip(1)])


# Transformers alone.


def alone_of_tests(checkout: Path, name: str) -> Iterator[Callable[[], Case]]:
    """Yield makers of a transformer from diffusers' tests of models."""
    for file in _files(checkout / "tests" / "models", name):
        for kind in _test_classes(checkout, file, "get_init_dict"):
            tests = kind()
            if tests.model_class.__name__ == name:
                yield lambda tests=tests: alone(tests.model_class(**tests.get_init_dict()), tests.get_dummy_inputs)


def small_transformer(checkout: Path | None, name: str) -> Callable[[], torch.nn.Module] | None:
    """Return a function that makes a small transformer of a class, or None."""
    if name in SMALL:
        return lambda: getattr(diffusers.models.transformers, name)(**SMALL[name][0])
    for file in [] if checkout is None else _files(checkout / "tests" / "models", name):
        for kind in _test_classes(checkout, file, "get_init_dict"):
            if kind().model_class.__name__ == name:
                return lambda kind=kind: kind().model_class(**kind().get_init_dict())
    return None


def alone_of_small(name: str) -> Iterator[Callable[[], Case]]:
    """Yield a maker of a transformer from our own configurations."""
    sizes, inputs = SMALL.get(name, ({}, None))
    if inputs is not None:
        yield lambda: alone(getattr(diffusers.models.transformers, name)(**sizes), inputs)


def alone(transformer: torch.nn.Module, inputs: Callable[..., dict[str, Any]]) -> Case:
    """A case of a transformer in a denoising loop with two branches of guidance; `inputs` may take `batch_size`."""
    redrawn(transformer)
    sized = "batch_size" in inspect.signature(inputs).parameters
    first = inputs(batch_size=1) if sized else inputs()
    time = next((name for name in TIMESTEPS if first.get(name) is not None), None)
    if time is None:
        raise NotRun(f"its forward takes no {', '.join(TIMESTEPS)}")
    scale = 1.0 if float(torch.as_tensor(first[time]).max()) <= 1 else 1000.0
    values = [scale * (1 - step / STEPS) for step in range(STEPS)]

    def candidates(batch: int) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        result = [inputs(batch_size=batch)] if sized else []
        one = inputs(batch_size=1) if sized else inputs()
        rows = len(latents_of(one)[0])
        return [*result, one if batch == 1 else {name: _doubled(value, rows) for name, value in one.items()}]

    @torch.no_grad()
    def denoise(**arguments: Any) -> list[torch.Tensor]:
        arguments[time] = torch.as_tensor(arguments[time])
        latents = [*latents_of(arguments), *(arguments[item] for item in FURTHER_LATENTS if item in arguments)]
        outputs: list[torch.Tensor] = []
        for value in values:
            arguments[time] = torch.full_like(arguments[time], value)
            branches = []
            for branch in (arguments, {name: _negated(name, options) for name, options in arguments.items()}):
                output = transformer(**branch)
                leaves = pytree.tree_leaves([*output.values()] if isinstance(output, dict) else output)
                predicted = predictions(leaves, arguments)
                branches.append([leaf for leaf, is_one in zip(leaves, predicted, strict=True) if is_one])
            outputs = [2 * one - other for one, other in zip(*branches, strict=True)]
            for latent, output in zip(latents, outputs, strict=False):
                if latent.ndim == output.ndim:  # one of the two may have more channels
                    part = tuple(slice(min(sizes)) for sizes in zip(latent.shape, output.shape, strict=True))
                    latent[part].sub_(output[part], alpha=1 / STEPS)
        return outputs

    def accelerate(kind: str) -> tuple:
        acceleration = accelerate_transformer(transformer, timesteps=values, **PRESETS[kind])
        return acceleration.report, acceleration.restore

    run = first_that_runs(denoise, candidates)
    return Case("alone", [transformer], lambda batch: tensors(run(batch)), accelerate)


@torch.no_grad()
def redrawn(transformer: torch.nn.Module) -> None:
    """Draw its weights, and damp the fast sinusoids of the timestep in embedders that are the model's own, too."""
    redraw(transformer.eval())
    for name, part in transformer.named_modules():
        is_embedder = name == "time_embedding" or re.search(r"Time\w*Emb", type(part).__name__, re.IGNORECASE)
        if is_embedder and not isinstance(part, TimestepEmbedding):
            linear = next((item for item in part.modules() if isinstance(item, torch.nn.Linear)), None)
            is_nested = any(isinstance(item, TimestepEmbedding) for item in part.modules())
            if linear is not None and not is_nested and linear.in_features % 2 == 0:
                smooth_in_time(linear)


def _doubled(value: Any, rows: int) -> Any:
    if isinstance(value, list):
        return [*value, *value]
    is_batch = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows
    return torch.cat([value, value]) if is_batch else value


def _negated(name: str, value: Any) -> Any:
    """An argument of the second branch of guidance, which has other embeddings of the prompt."""
    is_prompt = name.startswith("encoder_hidden_states") and isinstance(value, torch.Tensor)
    return -value if is_prompt and value.is_floating_point() else value
