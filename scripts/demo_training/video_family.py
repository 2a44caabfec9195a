"""Interface of video pipelines' families, in addition to `Family`."""

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
TEXT_TOKENS = 64  # padded length in the transformers' training
SHIFT = 7.0  # of the noise schedule; noise levels above 0.9 decide the motion, so most steps must be there


class Shape(NamedTuple):
    """Shape of a video: `frames`, 4 n + 1 of them, of `size` pixels a side."""

    frames: int
    size: int


class VideoFamily(Family):
    """Parts of a video family at demo size, and functions that training calls.

    Videos are [N, 3, F, H, W] in -1..1 with F = 4 n + 1 frames; latents are [N, LATENT_CHANNELS, n + 1, H / 8, W / 8].
    """

    call: ClassVar[dict[str, Any]]  # arguments of a call except sizes and steps
    guidance_argument: str  # name of the argument that scales classifier-free guidance
    longer: ClassVar[dict[Shape, int]] = {}  # more training shapes, with videos per step

    @abstractmethod
    def encode(self, vae: nn.Module, clips: torch.Tensor) -> torch.Tensor:
        """Mean and log variance of the videos' latents, side by side along the channels; equal to `vae.encode`, but in
        one pass and with gradients."""

    @abstractmethod
    def decode(self, vae: nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents of the autoencoder's encoder to videos; equal to `vae.decode`, but not clamped."""

    @contextmanager
    def quick_training(self, vae: nn.Module) -> Iterator[None]:
        """Use equivalent operations in the autoencoder that train faster, within the block."""
        yield

    @abstractmethod
    def set_statistics(self, vae: nn.Module, mean: torch.Tensor, deviation: torch.Tensor) -> None:
        """Set the mean and standard deviation of the latents in `vae`, both float32 [LATENT_CHANNELS]."""

    @abstractmethod
    def normalise(self, vae: nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """Convert the encoder's latents to the transformer's."""

    def lengthen(self, text: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Pad the text to the pipeline's default length; None if that makes no difference."""
        return None


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Build the schedule that all families are trained for."""
    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)


@torch.no_grad()
def init_transformer(transformer: nn.Module, zero: tuple[str, ...]) -> None:
    """Initialise all linear layers uniformly, without biases; layers whose names end in one of `zero` start at zero."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            if name.endswith(zero):
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
