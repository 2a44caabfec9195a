"""What a demo model must say of itself so that the driver can train it: what differs between pictures and clips."""

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

Batch = tuple[torch.Tensor, list[HeldOutPrompt]]  # pictures or clips in 0..1, and what each of them shall show


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything; `steps` limits each training where it is set, instead of the clock."""

    scenes: int
    vae_seconds: float
    vae_rate: float
    flow_rate: float
    finish_seconds: float
    sample_steps: int
    prompts: int
    steps: int | None = None


class Demo(ABC):
    """A demo model: its family, its sizes, and how what it draws is drawn, learnt, painted and read.

    A scene is a picture or a clip; scenes come as packed numbers [N, K] on the device that trains.
    """

    unit: ClassVar[str]  # what a scene is, in the plural
    draw: ClassVar[Callable]  # `draw(rng)` and `draw(rng, scene)` give something with a `.prompt`
    pack: ClassVar[Callable[[Sequence[Any]], torch.Tensor]]  # numbers of a list of such
    held_out: ClassVar[Callable[..., list[HeldOutPrompt]]]  # `held_out(count, split)`
    read: ClassVar[Callable[[torch.Tensor], list]]  # what is seen in a batch in 0..1
    agreement: ClassVar[Callable[..., dict[str, float]]]  # of what is seen with scenes
    words: list[str]
    family: Family
    sizes: Sizes

    @abstractmethod
    def train_autoencoder(self, vae: nn.Module, numbers: torch.Tensor, pace: Pace) -> None:
        """Train a float32 autoencoder on the CPU, and make it know its latents' statistics."""

    def quick(self, vae: nn.Module, device: torch.device) -> nn.Module:
        """The autoencoder in bf16, for use alone; may be `vae` itself."""
        return vae.to(device, torch.bfloat16).requires_grad_(False).eval()

    @abstractmethod
    def autoencoder_psnr(self, vae: nn.Module, device: torch.device) -> Any:
        """The PSNR in dB on held-out scenes, for the log."""

    @abstractmethod
    def make_bank(self, vae: nn.Module, numbers: torch.Tensor, text: tuple[torch.Tensor, ...]) -> Any:
        """What `train_flow` reads; its length is the number of scenes in it. Text has the empty prompt's row first."""

    @abstractmethod
    def compile_blocks(self, flow: nn.Module) -> None:
        """Compile the transformer's repeated blocks, in place."""

    @abstractmethod
    def backward_at_every_shape(self, flow: nn.Module, text: tuple[torch.Tensor, ...], device: torch.device) -> None:
        """Run forward and backward once at every training shape."""

    @abstractmethod
    def train_flow(
        self, flow: nn.Module, masters: list[torch.Tensor], bank: Any, pace: Pace, seed: int
    ) -> list[torch.Tensor]:
        """Train in place; returns the averaged weights in float32, in the order of `trained_weights(flow)`."""

    @abstractmethod
    def save(self, pipe: DiffusionPipeline, folder: Path) -> int:
        """Write the pipeline, its card and the arguments of a call; returns the folder's size in bytes."""

    @abstractmethod
    def paint(self, pipe: DiffusionPipeline, prompts: list[HeldOutPrompt]) -> dict[str, Batch]:
        """Batches by what they are: painted, first of all, and drawn."""

    @abstractmethod
    def sheet(self, batches: dict[str, Batch]) -> Image.Image:
        """A sheet of some of what `paint` gave."""
