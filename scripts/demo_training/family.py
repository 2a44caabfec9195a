"""What a family of pipelines must say of itself so that `train_demo.py` can train a demo of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import nn


class Family(ABC):
    """A family's parts at demo size; `small` asks for toy sizes."""

    name: str

    @abstractmethod
    def make_vae(self, *, small: bool) -> nn.Module:
        """An untrained autoencoder."""

    @abstractmethod
    def make_tokenizers(self, words: list[str]) -> tuple:
        """Tokenizers that know `words`."""

    @abstractmethod
    def tokenize(self, tokenizers: tuple, prompts: list[str]) -> tuple[torch.Tensor, ...]:
        """Token ids and masks as the pipeline makes them, int64 [N, length] each: what `make_flow`'s model takes."""

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
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe
