"""What tiny pipelines are built with and called with."""

import diffusers
import torch

from tests.tiny import encoders

TOKENS, WIDTH = 12, encoders.FEATURES  # of prompts


def text(*shape: int, seed: int = 0) -> torch.Tensor:
    """What a text encoder might give."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flow(**settings):
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)
