"""Components and arguments of tiny pipelines."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch

from tests.tiny import encoders

CONFIGS = json.loads(Path(__file__).with_name("transformers.json").read_text(encoding="utf-8"))  # by class
TOKENS, WIDTH = 12, encoders.FEATURES  # of prompts
SQUARE = {"height": 192, "width": 192}


def small(kind: str, **changes: Any) -> diffusers.ModelMixin:
    """A transformer of diffusers' class, with the sizes of transformers.json and changes."""
    return getattr(diffusers, kind)(**CONFIGS[kind] | changes)


def text(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random text embeddings, as from a text encoder."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompts(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random embeddings of a prompt and a negative prompt, by the names of the pipeline's arguments."""
    signs = enumerate(("", "negative_"))
    return {f"{sign}{name}": text(*shape, seed=seed) for seed, sign in signs for name, shape in shapes.items()}


def like(model: diffusers.ModelMixin, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the model's dtype, on its device, as an encoder on the same device gives it."""
    return tensor.to(model.device, model.dtype)


def flow(**settings):
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)
