"""Components and arguments of tiny pipelines."""

import diffusers
import torch

from tests.tiny import encoders

TOKENS, WIDTH = 12, encoders.FEATURES  # of prompts
HEADS = {"num_attention_heads": 2, "attention_head_dim": 32}
TWO_KINDS = {**HEADS, "num_layers": 1, "num_single_layers": 1}  # of blocks
ROPE = {"axes_dims_rope": (8, 12, 12)}
FOUR_CHANNELS = {"in_channels": 4, "out_channels": 4}
SQUARE = {"height": 192, "width": 192}


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
