"""Interface between a family of pipelines and the training of a demo model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import nn


class Family(ABC):
    """Parts of a family at demo size; `small` asks for toy sizes."""

    name: str

    @abstractmethod
    def make_vae(self, *, small: bool) -> nn.Module:
        """Build an untrained autoencoder."""

    @abstractmethod
    def make_tokenizers(self, words: list[str]) -> tuple:
        """Build tokenizers that know `words`."""

    @abstractmethod
    def tokenize(self, tokenizers: tuple, prompts: list[str]) -> tuple[torch.Tensor, ...]:
        """Token ids and masks as in the pipeline, int64 [N, length] each: the inputs of `make_flow`'s model."""

    @abstractmethod
    def make_flow(self, tokenizers: tuple, *, small: bool) -> nn.Module:
        """Build everything that learns by rectified flow, untrained, with the transformer as `.transformer`.

        It takes noisy latents, their noise levels in 0..1 [N], and `tokenize`'s tensors, and returns velocities.
        """

    @abstractmethod
    def flow_of(self, pipe: DiffusionPipeline) -> nn.Module:
        """Build the same from a pipeline's own parts."""

    @abstractmethod
    def tokenizers_of(self, pipe: DiffusionPipeline) -> tuple:
        """Return a pipeline's tokenizers, in the order of `make_tokenizers`."""

    @abstractmethod
    def assemble(self, vae: nn.Module, flow: nn.Module, tokenizers: tuple) -> DiffusionPipeline:
        """Build the pipeline from these parts."""

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
        """Read a pipeline folder."""
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe
