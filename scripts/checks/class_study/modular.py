"""Modular pipelines of the blocks that denoise, which take embeddings instead of prompts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scripts.checks.class_study import cases
from scripts.checks.class_study.cases import Case
from scripts.checks.class_study.small import TOKENS, text


def _prompts(batch: int, *sizes: int) -> dict[str, Any]:
    """Embeddings ``[batch, tokens, *sizes]`` for both branches of guidance, with masks."""
    arguments: dict[str, Any] = {}
    for seed, sign in enumerate(("", "negative_")):
        arguments[f"{sign}prompt_embeds"] = text(batch, TOKENS, *sizes, seed=seed)
        arguments[f"{sign}prompt_embeds_mask"] = torch.ones(batch, TOKENS, dtype=torch.bool)
        arguments[f"{sign}image_pad_mask"] = torch.zeros(batch, TOKENS, dtype=torch.bool)
    return arguments


def flux3(transformer: Any, batch: int) -> dict[str, Any]:
    return {**_prompts(batch, transformer.config.joint_attention_dim), "height": 128, "width": 128}


def qwen_image21(transformer: Any, batch: int) -> dict[str, Any]:
    return {**_prompts(batch, transformer.config.context_in_dim), "height": 128, "width": 128}


def krea2(transformer: Any, batch: int) -> dict[str, Any]:
    sizes = transformer.config.num_text_layers, transformer.config.text_hidden_dim
    return {**_prompts(batch, *sizes), "height": 64, "width": 64}


def ernie_image(transformer: Any, batch: int) -> dict[str, Any]:
    width = transformer.config.text_in_dim
    embeddings = {sign: [text(TOKENS, width, seed=seed)] * batch for seed, sign in enumerate(("", "negative_"))}
    return {f"{sign}prompt_embeds": each for sign, each in embeddings.items()} | {"height": 64, "width": 64}


def minimax_h3(transformer: Any, batch: int) -> dict[str, Any]:
    if batch > 1:
        raise cases.NotRun("it packs one prompt into one sequence")
    tags = torch.ones(TOKENS, dtype=torch.long)
    embeddings = text(1, TOKENS, transformer.config.text_dim)
    return {"prompt_embeds": embeddings, "text_token_tags": tags, "height": 32, "width": 32, "num_frames": 124}


def cosmos3(transformer: Any, batch: int) -> dict[str, Any]:
    if batch > 1:
        raise cases.NotRun("it packs one prompt into one sequence")
    size = {"num_frames": 1, "height": 64, "width": 64, "guidance_scale": 2.0}
    return {"cond_input_ids": list(range(TOKENS)), "uncond_input_ids": [1, 2], **size}


# by transformer class: module and class of the blocks, the arguments of a call, and the outputs
MODULAR: dict[str, tuple[str, str, Callable[[Any, int], dict[str, Any]], tuple[str, ...]]] = {
    "Flux3Transformer2DModel": ("flux3.modular_blocks_flux3", "Flux3CoreDenoiseStep", flux3, ("latents",)),
    "QwenImage21Transformer2DModel": (
        "qwenimage21.modular_blocks_qwenimage21",
        "QwenImage21CoreDenoiseStep",
        qwen_image21,
        ("latents",),
    ),
    "Krea2Transformer2DModel": ("krea2.modular_blocks_krea2", "Krea2CoreDenoiseStep", krea2, ("latents",)),
    "ErnieImageTransformer2DModel": (
        "ernie_image.modular_blocks_ernie_image",
        "ErnieImageCoreDenoiseStep",
        ernie_image,
        ("latents",),
    ),
    "MiniMaxH3Transformer3DModel": (
        "minimax_h3.modular_blocks_minimax_h3",
        "MiniMaxH3CoreDenoiseStep",
        minimax_h3,
        ("latents", "audio_latents"),
    ),
    "Cosmos3OmniTransformer": (
        "cosmos.modular_blocks_cosmos3",
        "Cosmos3VisionCoreDenoiseStep",
        cosmos3,
        ("latents",),
    ),
}


def makers(name: str, transformer: Callable[[], torch.nn.Module] | None) -> Iterator[Callable[[], Case]]:
    """Yield a maker of the modular pipeline of a class.

    Args:
        transformer: makes a small one; None = none is known.
    """
    if name in MODULAR and transformer is not None:
        yield lambda: _case(transformer(), *MODULAR[name])


def _case(transformer: Any, module: str, blocks: str, inputs: Callable[..., Any], outputs: tuple[str, ...]) -> Case:
    denoise = getattr(importlib.import_module(f"diffusers.modular_pipelines.{module}"), blocks)()
    cases.redrawn(transformer)
    schedulers = {each.name: each.type_hint() for each in denoise.expected_components if "scheduler" in each.name}
    pipe = denoise.init_pipeline()
    pipe.update_components(transformer=transformer, **schedulers)
    pipe.set_progress_bar_config(disable=True)

    def call(batch: int) -> Any:
        arguments = {"num_inference_steps": cases.STEPS, "generator": torch.Generator().manual_seed(0)}
        made = pipe(**arguments, **inputs(transformer, batch), output=list(outputs))
        return [made[name] for name in outputs]

    return cases.of_pipeline(pipe, call, blocks)
