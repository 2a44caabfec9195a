"""Some samples of a batch, and the batch again from its parts. Rows are places in the batch, its first dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Rows = tuple[int, ...] | None  # None = all


def take_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Samples ``rows`` of ``[B, …]``, in that order; put together from slices, for indices would make the host wait."""
    return torch.cat([tensor[row : row + 1] for row in rows])


def join_rows(parts: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The batch of which ``parts[i]`` holds the samples ``rows[i]``, every sample in one of them."""
    places = sorted((row, part, own) for part, its_rows in enumerate(rows) for own, row in enumerate(its_rows))
    return torch.cat([parts[part][own : own + 1] for _, part, own in places])
