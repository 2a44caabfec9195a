"""What a family of video pipelines says of itself beyond what every family does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from .family import Family

LATENT_CHANNELS = 16
TEXT_TOKENS = 64  # the padded length that the transformers are trained at
SHIFT = 7.0  # of the noise schedule; what moves where is settled at noise levels above 0.9, where most steps must fall
GUIDANCE = 3.0


class Shape(NamedTuple):
    """Of a clip: `frames`, 4 n + 1 of them, of `size` pixels a side."""

    frames: int
    size: int


class VideoFamily(Family):
    """A video family's parts at demo size, and how training calls them.

    Clips are [N, 3, F, H, W] in -1..1 with F = 4 n + 1 frames; latents are [N, LATENT_CHANNELS, n + 1, H / 8, W / 8].
    """

    call: ClassVar[dict[str, Any]]  # arguments of a call beside sizes and steps
    guidance_argument: str  # the one of them that scales classifier-free guidance
    longer: ClassVar[dict[Shape, int]] = {}  # further shapes that it learns, with how many clips a step

    @abstractmethod
    def encode(self, vae: nn.Module, clips: torch.Tensor) -> torch.Tensor:
        """Mean and log variance of the clips' latents, side by side along the channels; equal to what `vae.encode` has,
        in one go and with gradients."""

    @abstractmethod
    def decode(self, vae: nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """Clips of latents as the autoencoder's encoder gives them; equal to `vae.decode`, but not clamped."""

    @contextmanager
    def quick_training(self, vae: nn.Module) -> Iterator[None]:
        """Within this, the autoencoder computes the same by operations that are quicker to train with."""
        yield

    @abstractmethod
    def set_statistics(self, vae: nn.Module, mean: torch.Tensor, deviation: torch.Tensor) -> None:
        """Make `vae` know its latents' mean and standard deviation, both float32 [LATENT_CHANNELS]."""

    @abstractmethod
    def normalise(self, vae: nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """The encoder's latents as the transformer sees them."""

    def lengthen(self, text: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """The same text padded as far as the pipeline does unless told otherwise; None if that makes no difference."""
        return None


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The schedule that all families are trained for."""
    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)


@torch.no_grad()
def init_transformer(transformer: nn.Module, zero: tuple[str, ...]) -> None:
    """Start all linear layers evenly, without biases, and those whose names end in one of `zero` at zero."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            if name.endswith(zero):
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
