"""What a family of video pipelines must say of itself so that `train_demo_video.py` can train a demo of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

LATENT_CHANNELS = 16
TEXT_TOKENS = 64  # the padded length that the transformers are trained at
SHIFT = 7.0  # of the noise schedule; what moves where is settled at noise levels above 0.9, where most steps must fall
GUIDANCE = 3.0


class VideoFamily(ABC):
    """A family's parts at demo size, and how training calls them.

    Clips are [N, 3, F, H, W] in -1..1 with F = 4 n + 1 frames; latents are [N, LATENT_CHANNELS, n + 1, H / 8, W / 8].
    `small` asks for toy sizes.
    """

    name: str
    call: ClassVar[dict[str, Any]]  # arguments of a call beside sizes and steps
    guidance_argument: str  # the one of them that scales classifier-free guidance

    @abstractmethod
    def make_vae(self, *, small: bool) -> nn.Module:
        """An untrained autoencoder."""

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

    @abstractmethod
    def make_tokenizers(self, words: list[str]) -> tuple:
        """Tokenizers that know `words`."""

    @abstractmethod
    def tokenize(self, tokenizers: tuple, prompts: list[str]) -> tuple[torch.Tensor, ...]:
        """Token ids and masks as the pipeline makes them, int64 [N, length] each: what `make_flow`'s model takes."""

    def lengthen(self, text: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """The same text padded as far as the pipeline does unless told otherwise; None if that makes no difference."""
        return None

    @abstractmethod
    def make_flow(self, tokenizers: tuple, *, small: bool) -> nn.Module:
        """All that learns by rectified flow, untrained, with the transformer as `.transformer`.

        Called with noisy latents, their noise levels in 0..1 [N], and `tokenize`'s tensors, it gives velocities.
        """

    @abstractmethod
    def flow_of(self, pipe: DiffusionPipeline) -> nn.Module:
        """The same, made of a pipeline's own parts."""

    @abstractmethod
    def tokenizers_of(self, pipe: DiffusionPipeline) -> tuple:
        """A pipeline's tokenizers, in the order of `make_tokenizers`."""

    @abstractmethod
    def assemble(self, vae: nn.Module, flow: nn.Module, tokenizers: tuple) -> DiffusionPipeline:
        """The pipeline of these parts."""

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
        """Read a pipeline folder."""
        pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe


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
