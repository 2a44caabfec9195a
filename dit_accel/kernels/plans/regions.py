"""Regions of a plan for the references: sets of tokens and heads that compute or are reused, as torch indices.

Row-blocks with the same heads go through one matrix product. So a plan in which everything computes costs one dense
call, and a sparse plan costs its computed share plus a gather.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dit_accel.kernels.layout import block_count
from dit_accel.kernels.packing import unpack_bits
from dit_accel.kernels.symbols import CAUSAL_TILE, FIRST_PARTIAL_TILE, FULL_TILE, AttentionPlan

Index = slice | torch.Tensor


class Region(NamedTuple):
    """``tokens``, counted from the stream's first, x ``heads`` of a batch entry; consecutive ones are a slice."""

    batch: int
    tokens: Index
    heads: Index

    @property
    def target(self) -> tuple[Index, Index]:
        """Index of the region in one batch entry ``[S, H, D]``, for writing."""
        if isinstance(self.tokens, torch.Tensor) and isinstance(self.heads, torch.Tensor):
            return self.tokens[:, None], self.heads
        return self.tokens, self.heads


def take(x: torch.Tensor, index: Index, axis: int = 0) -> torch.Tensor:
    """Return entries along an axis; ``index_select`` is 4 times as fast on a CPU as ``x[index]``."""
    if isinstance(index, slice):
        return x.narrow(axis, index.start, index.stop - index.start)
    return x.index_select(axis, index)


def regions(plan: AttentionPlan, *, computed: bool, offset: int = 0, length: int | None = None) -> Iterator[Region]:
    """Yield regions that compute (or, with ``computed=False``, are reused) in ``length`` tokens from ``offset`` on.

    The regions of one batch entry share no token.
    """
    stop = plan.tokens if length is None else offset + length
    device = plan.mask64.device
    for batch, words in enumerate(plan.mask64.tolist()):
        blocks_of_word = defaultdict(list)
        for index in range(offset // plan.block, block_count(stop, plan.block)):
            blocks_of_word[words[index]].append(index)
        for word, blocks in blocks_of_word.items():
            if heads := [head for head in range(plan.heads) if (word >> head & 1) == computed]:
                yield Region(batch, token_index(blocks, plan.block, offset, stop, device), _index(heads, device))


def token_index(blocks: Sequence[int], block: int, start: int, stop: int, device: torch.device) -> Index:
    """Tokens of ascending ``blocks`` that lie in ``start .. stop``, counted from ``start``."""
    run = _index(blocks, device)
    if isinstance(run, slice):
        first, last = max(run.start * block, start), min(run.stop * block, stop)
        return slice(first - start, max(first, last) - start)
    tokens = (run[:, None] * block + torch.arange(block, device=device)).flatten()
    return tokens[(tokens >= start) & (tokens < stop)] - start


def rows_that_compute(plan: AttentionPlan) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Yield batch entry, head, query block and, in list order, key blocks of each row that computes."""
    kv_count, kv_index = plan.kv_count.tolist(), plan.kv_index.tolist()
    for b, words in enumerate(plan.mask64.tolist()):
        for h in range(plan.heads):
            for row, word in enumerate(words):
                if word >> h & 1:
                    yield b, h, row, tuple(kv_index[b][h][row][: kv_count[b][h][row]])


def computing_rows(plan: AttentionPlan) -> torch.Tensor:
    """Mark the rows that compute: bool ``[B, H, T]``."""
    return (plan.mask64[:, None] >> torch.arange(plan.heads, device=plan.mask64.device)[:, None] & 1).bool()


def listed_tiles(plan: AttentionPlan) -> torch.Tensor:
    """Mark the tiles in a plan's lists: bool ``[B, H, Tq, Tk]``."""
    listed = torch.arange(plan.blocks, device=plan.kv_index.device) < plan.kv_count[..., None]
    tile = torch.where(listed, plan.kv_index, plan.blocks).long()  # entries beyond a row's count are uninitialised
    marks = torch.zeros(*tile.shape[:-1], plan.blocks + 1, dtype=torch.bool, device=tile.device)
    return marks.scatter_(-1, tile, True)[..., :-1]


def rows_alike(plan: AttentionPlan) -> Iterator[tuple[int, int, list[int], tuple[int, ...]]]:
    """Yield batch entry, head, query blocks with the same tiles, and these tiles; with masks one row at a time."""
    rows_of_tiles = defaultdict(list)
    for b, h, row, tiles in rows_that_compute(plan):
        rows_of_tiles[b, h, tuple(sorted(tiles)), None if plan.masks is None else row].append(row)
    for (b, h, tiles, _), rows in rows_of_tiles.items():
        yield b, h, rows, tiles


def tile_mask(plan: AttentionPlan, b: int, h: int, row: int, tile: int) -> torch.Tensor | None:
    """Return the pairs of a tile that attend, bool ``[block, block]``; None = all."""
    if plan.masks is None:
        return None
    code = int(plan.masks.codes.expand(plan.batch, plan.heads, -1, -1)[b, h, row, tile])
    if code == FULL_TILE:
        return None
    if code == CAUSAL_TILE:
        token = torch.arange(plan.block, device=plan.masks.codes.device)
        return tile * plan.block + token <= row * plan.block + token[:, None]
    return unpack_bits(plan.masks.pool[code - FIRST_PARTIAL_TILE], plan.block, backend="reference")


def _index(values: Sequence[int], device: torch.device) -> Index:
    """Return ascending values as a slice if they are consecutive, else as an int64 tensor."""
    if not values:
        return slice(0, 0)
    if values[-1] - values[0] == len(values) - 1:
        return slice(values[0], values[-1] + 1)
    return torch.tensor(values, device=device)
