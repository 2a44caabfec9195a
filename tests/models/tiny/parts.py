"""Components and arguments of tiny pipelines."""

import diffusers
import torch

from tests.tiny import encoders

TOKENS, WIDTH = 12, encoders.FEATURES  # of prompts


def text(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random text embeddings, as from a text encoder."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def like(model: diffusers.ModelMixin, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the model's dtype, on its device, as an encoder on the same device gives it."""
    return tensor.to(model.device, model.dtype)


def flow(**settings):
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)
