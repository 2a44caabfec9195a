"""Shifts, scales and gates of HunyuanVideo's blocks.

The variant for pictures (``token_replace``) modulates the tokens of the first frame by an embedding of their own, so
every value is a tuple: of all tokens, or of the first frame's and of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Modulation = tuple[torch.Tensor, ...]  # [B, 1, C] each


def modulations(
    norm: nn.Module, temb: torch.Tensor, first_frame_emb: torch.Tensor | None, count: int
) -> list[Modulation]:
    """The ``count`` values of a block's norm: shift, scale and gate of its attention, then of its MLP."""
    embeddings = [temb] if first_frame_emb is None else [first_frame_emb, temb]
    values = (norm.linear(norm.silu(embedding)).unsqueeze(1).chunk(count, dim=2) for embedding in embeddings)
    return list(zip(*values, strict=True))


def by_frame(
    function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], count: int | None, *values: Modulation
) -> Any:
    """``function(*tensors, *values)``, where the first ``count`` tokens may have values of their own."""
    if len(values[0]) == 1:
        return function(*tensors, *(value for (value,) in values))
    parts = zip((slice(count), slice(count, None)), *values, strict=True)
    results = [function(*(x[:, tokens] for x in tensors), *own) for tokens, *own in parts]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(part, dim=1) for part in zip(*results, strict=True))
    return torch.cat(results, dim=1)
