"""Where in a model does acceleration apply? A family is a page of facts, by which drivers and hooks work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Names in a pipeline under which diffusers keeps transformers that denoise; Wan 2.2 has two.
TRANSFORMER_NAMES = ("transformer", "transformer_2")


def denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """The pipeline's transformers, by name; empty where it denoises with something else."""
    found = {name: getattr(pipe, name, None) for name in TRANSFORMER_NAMES}
    return {name: module for name, module in found.items() if module is not None}
