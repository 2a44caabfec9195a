"""Modular pipelines of the blocks that denoise, which take embeddings instead of prompts."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from scripts.checks.class_study import cases
from scripts.checks.class_study.blocks import MODULAR, Blocks
from scripts.checks.class_study.cases import Case, NotRun
from scripts.checks.class_study.small import TOKENS, WIDTH, text
from tests.models import tiny
from tests.tiny import TINY_PIPELINES, tiny_pipeline

TEXT_WIDTHS = ("joint_attention_dim", "context_in_dim", "text_embed_dim", "text_dim", "cap_feat_dim")
TEXT_WIDTHS += ("caption_channels", "cross_attention_dim")  # names in the configuration of a transformer


def makers(name: str, transformer: Callable[[], torch.nn.Module] | None) -> Iterator[Callable[[], Case]]:
    """Yield a maker of each modular pipeline of a class; `transformer` makes a small one, if one is known."""
    for blocks in MODULAR.get(name, ()):
        if blocks.tiny or transformer:
            yield partial(_case, blocks, transformer)


def _case(blocks: Blocks, transformer: Callable[[], torch.nn.Module] | None) -> Case:
    kind = _class(blocks)
    denoise = kind()
    pipe = denoise.init_pipeline()
    pipe.update_components(**_components(blocks, denoise, transformer))
    pipe.set_progress_bar_config(disable=True)
    denoisers = [item for item in pipe.components.values() if cases.is_denoiser(item)]
    for item in denoisers:
        cases.redrawn(item)
    config = denoisers[0].config
    width = next((config[name] for name in TEXT_WIDTHS if isinstance(config.get(name), int)), WIDTH)
    names = [item.name or item.kwargs_type for item in denoise.inputs]

    def call(batch: int) -> Any:
        arguments = {"num_inference_steps": cases.STEPS, **_embeddings(names, width, batch), **blocks.call}
        arguments |= {**blocks.inputs(denoisers[0], batch), "generator": torch.Generator().manual_seed(0)}
        taken = {name: value for name, value in arguments.items() if name in names}
        result = pipe(**taken, output=list(blocks.outputs))
        return [result[name] for name in blocks.outputs]

    return cases.of_pipeline(pipe, call, kind.__name__)


def _class(blocks: Blocks) -> type:
    """Return the class of blocks, which the folder's package may not export."""
    folder = importlib.import_module(f"diffusers.modular_pipelines.{blocks.folder}")
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        if "modular_blocks" in module.name:
            held = vars(importlib.import_module(module.name))
            found = held.get(f"{blocks.name}CoreDenoiseStep", held.get(blocks.name))
            if found is not None:
                return found
    raise NotRun(f"diffusers has no {blocks.name}")


def _components(blocks: Blocks, denoise: Any, transformer: Callable[[], torch.nn.Module] | None) -> dict[str, Any]:
    """Return the components that the blocks want and have no default of."""
    wanted = {item.name: item.type_hint for item in denoise.expected_components}
    parts = blocks.parts()
    if blocks.tiny in TINY_PIPELINES:
        parts |= tiny_pipeline(blocks.tiny).components
    elif blocks.tiny:
        parts |= tiny.built.__wrapped__(blocks.tiny)[0].components
    else:
        parts |= {name: transformer() for name in wanted if "transformer" in name}  # type: ignore[misc]
        parts |= {name: kind() for name, kind in wanted.items() if "scheduler" in name and name not in parts}
    if blocks.sizes:
        parts["transformer"] = type(parts["transformer"]).from_config(parts["transformer"].config, **blocks.sizes)
    return {name: part for name, part in parts.items() if name in wanted and part is not None}


def _embeddings(names: list[str], width: int, batch: int) -> dict[str, torch.Tensor]:
    """Return embeddings ``[batch, tokens, width]`` and masks for those inputs of blocks that are of a prompt."""
    output: dict[str, torch.Tensor] = {}
    for name in names:
        seed = int(name.startswith("negative"))
        if "pooled" in name:
            output[name] = text(batch, width, seed=seed)
        elif re.search(r"prompt_(ref_)?embeds(_2)?$", name):
            output[name] = text(batch, TOKENS, width, seed=seed)
        elif re.search(r"(embeds|pad|(prompt|connector|qwen|t5)_attention)_mask", name):
            output[name] = torch.full((batch, TOKENS), "pad" not in name)
    return output
