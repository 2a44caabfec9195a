"""Ranks that share a decode, and the band of rows that each of them has."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

FAILED, NO, YES = -1, 0, 1  # votes
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the former from torch 2.13 on


class Ranks:
    """The ``count`` ranks that share a decode, of which this process is ``rank``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def vote(self, value: int, about: Any = None) -> int:
        """Return the least vote of all ranks, at most NO if they vote about different things."""
        number = zlib.crc32(repr(about).encode())  # hash() differs between processes
        votes = torch.tensor([value, number, -number], device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
        least, low, high = votes.tolist()
        return least if low == -high else min(least, NO)


class Rows:
    """Bands of the ``height`` rows of latents, one a rank, which may differ by a row."""

    def __init__(self, ranks: Ranks, height: int) -> None:
        self._ranks = ranks
        self._ends = [height * (rank + 1) // ranks.count for rank in range(ranks.count)]
        self._heights = [end - start for start, end in zip([0, *self._ends], self._ends, strict=False)]
        self._rows = self._heights[ranks.rank]
        self._skipped = 0
        self._done = 0

    def replay(self) -> Rows:
        """Return the bands for the same decode with meta tensors, which skips the exchanges so far."""
        self._skipped, self._done = self._done, 0
        return self

    def band(self, x: torch.Tensor) -> torch.Tensor:
        scale, end = x.shape[-2] // self._ends[-1], self._ends[self._ranks.rank]
        return x[..., scale * (end - self._rows) : scale * end, :]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        scale, most = x.shape[-2] // self._rows, max(self._heights)
        bands = self._gathered(F.pad(x, (0, 0, 0, scale * most - x.shape[-2])))
        return torch.cat([band[..., : scale * rows, :] for band, rows in zip(bands, self._heights, strict=True)], -2)

    def tallest(self, x: torch.Tensor) -> int:
        return x.shape[3] // self._rows * max(self._heights)

    def merged(self, moments: torch.Tensor) -> torch.Tensor:
        """Return the moments of whole features ``[B, groups, 2]``, mean and variance, from those of each band."""
        mean, variance = self._gathered(moments).unbind(-1)
        shares = mean.new_tensor(self._heights).view(-1, 1, 1) / self._ends[-1]
        whole = (shares * mean).sum(0)
        return torch.stack([whole, (shares * (variance + (mean - whole).square())).sum(0)], -1)

    def exchange_border(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Write the neighbours' rows into the border of ``[B, C, T, H + 2, W + 2]``; it stays at an image's border."""
        rows = x.permute(0, 2, 3, 4, 1)  # dense pixels
        edges = torch.stack([rows[:, :, 1], rows[:, :, -2]]).to(dtype or x.dtype)  # x's may differ between ranks
        edges = self._gathered(edges)  # [ranks, 2, B, T, W + 2, C]
        if self._ranks.rank > 0:
            rows[:, :, 0] = edges[self._ranks.rank - 1, 1]
        if self._ranks.rank < self._ranks.count - 1:
            rows[:, :, -1] = edges[self._ranks.rank + 1, 0]

    def bordered(self, x: torch.Tensor) -> torch.Tensor:
        """Return features with a border of neighbours' rows, and of zeros at the border of the image."""
        x = F.pad(x.contiguous(memory_format=torch.channels_last_3d), (1, 1, 1, 1))
        self.exchange_border(x)
        return x

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return tensors of one shape from all ranks; meta tensors are sent as zeros."""
        if x.is_meta:
            if self._done >= self._skipped:
                self._sent(torch.zeros(x.shape, dtype=x.dtype, device=self._ranks.device))
            output = x.new_empty(self._ranks.count, *x.shape)
        else:
            output = self._sent(x)
        self._done += 1
        return output

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self._ranks.count * len(x), *x.shape[1:])
        _all_gather(gathered, x.contiguous(), group=self._ranks.group)
        return gathered.unflatten(0, (self._ranks.count, -1))
