"""Take samples from a batch, and join a batch from its parts. Rows are places in the first dimension."""

from collections.abc import Sequence

import torch

Rows = tuple[int, ...] | None  # None = the whole batch


def take_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the samples ``rows`` of ``[B, …]``, in that order, from slices, because indexing makes the host wait."""
    return torch.cat([tensor[row : row + 1] for row in rows])


def join_rows(parts: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the batch whose samples ``rows[i]`` are in ``parts[i]``; every sample is in one part."""
    places = sorted((row, part, index) for part, its_rows in enumerate(rows) for index, row in enumerate(its_rows))
    return torch.cat([parts[part][index : index + 1] for _, part, index in places])
