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


def normalise(
    norm: nn.Module, x: torch.Tensor, temb: torch.Tensor, first_frame_emb: torch.Tensor | None, count: int | None
) -> tuple[Any, ...]:
    """The normalised, modulated ``x``, then the block's other modulations."""
    if first_frame_emb is None:
        x, *values = norm(x, emb=temb)
        return x, *((value.unsqueeze(1),) for value in values)
    x, *values = norm(x, temb, first_frame_emb, count)
    half = len(values) // 2  # values of the other tokens, then the same of the first frame's
    others, firsts = values[:half], values[half:]
    return x, *((first.unsqueeze(1), other.unsqueeze(1)) for first, other in zip(firsts, others, strict=True))


def gates_of(
    norm: nn.Module, temb: torch.Tensor, first_frame_emb: torch.Tensor | None, chunks: int
) -> list[Modulation]:
    """Every gate of a norm, without normalising anything: the last of each (shift, scale, gate)."""
    embeddings = [temb] if first_frame_emb is None else [first_frame_emb, temb]
    values = (norm.linear(norm.silu(embedding)).unsqueeze(1).chunk(chunks, dim=2) for embedding in embeddings)
    return list(zip(*(value[2::3] for value in values), strict=True))


def by_frame(
    function: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], count: int | None, *values: Modulation
) -> torch.Tensor:
    """``function(*tensors, *values)``, where the first ``count`` tokens may have values of their own."""
    if len(values[0]) == 1:
        return function(*tensors, *(value for (value,) in values))
    parts = zip((slice(count), slice(count, None)), *values, strict=True)
    return torch.cat([function(*(x[:, tokens] for x in tensors), *own) for tokens, *own in parts], dim=1)


def modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, x, 1 + scale)
