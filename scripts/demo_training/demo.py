"""Interface between a demo model and the training driver: the parts that differ between images and videos."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

from .family import Family
from .prompts import HeldOutPrompt
from .training import Pace

Batch = tuple[torch.Tensor, list[HeldOutPrompt]]  # images or videos in 0..1, and the prompt of each


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of everything; `steps`, if set, limits each training instead of the clock."""

    scenes: int
    vae_seconds: float
    vae_rate: float
    flow_rate: float
    finish_seconds: float
    sample_steps: int
    prompts: int
    steps: int | None = None


class Demo(ABC):
    """A demo model: its family, its sizes, and functions that generate, learn, sample and read scenes.

    A scene is an image or a video; scenes are packed numbers [N, K] on the training device.
    """

    unit: ClassVar[str]  # plural name of a scene
    draw: ClassVar[Callable]  # `draw(rng)` and `draw(rng, scene)` return an object with a `.prompt`
    pack: ClassVar[Callable[[Sequence[Any]], torch.Tensor]]  # packed numbers of a list of these objects
    held_out: ClassVar[Callable[..., list[HeldOutPrompt]]]  # `held_out(count, split)`
    read: ClassVar[Callable[[torch.Tensor], list]]  # readings of a batch in 0..1
    agreement: ClassVar[Callable[..., dict[str, float]]]  # compares readings with scenes
    words: list[str]
    family: Family
    sizes: Sizes

    @abstractmethod
    def train_autoencoder(self, vae: nn.Module, numbers: torch.Tensor, pace: Pace) -> None:
        """Train a float32 autoencoder on the CPU, and set its latents' statistics."""

    def quick(self, vae: nn.Module, device: torch.device) -> nn.Module:
        """Return the autoencoder in bf16, for use alone; may be `vae` itself."""
        return vae.to(device, torch.bfloat16).requires_grad_(False).eval()

    @abstractmethod
    def autoencoder_psnr(self, vae: nn.Module, device: torch.device) -> Any:
        """PSNR in dB on held-out scenes, for the log."""

    @abstractmethod
    def make_bank(self, vae: nn.Module, numbers: torch.Tensor, text: tuple[torch.Tensor, ...]) -> Any:
        """Make the input of `train_flow`; its length is its number of scenes. Row 0 of the text is the empty prompt."""

    @abstractmethod
    def compile_blocks(self, flow: nn.Module) -> None:
        """Compile the transformer's repeated blocks, in place."""

    @abstractmethod
    def train_flow(
        self, flow: nn.Module, masters: list[torch.Tensor], bank: Any, pace: Pace, seed: int
    ) -> list[torch.Tensor]:
        """Train in place; return the averaged weights in float32, in the order of `trained_weights(flow)`."""

    @abstractmethod
    def save(self, pipe: DiffusionPipeline, folder: Path) -> int:
        """Write the pipeline, its card and the arguments of a call; return the folder's size in bytes."""

    @abstractmethod
    def paint(self, pipe: DiffusionPipeline, prompts: list[HeldOutPrompt]) -> dict[str, Batch]:
        """Return batches by their description: first sampled, then rendered."""

    @abstractmethod
    def sheet(self, batches: dict[str, Batch]) -> Image.Image:
        """Make a sheet of some results of `paint`."""
