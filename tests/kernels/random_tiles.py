"""Random masks inside tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dit_accel.kernels.layout import block_count
from dit_accel.kernels.plans.tile_masks import symbols_of_tiles
from dit_accel.kernels.symbols import CAUSAL_TILE, FIRST_PARTIAL_TILE, FULL_TILE, SparseSymbols, TileMasks

CODES = {"full": FULL_TILE, "causal": CAUSAL_TILE, "partial": FIRST_PARTIAL_TILE}
RANDOM = {"full/partial": ("full", "partial"), "full/causal/partial": ("full", "causal", "partial")}


def random_tiles(
    tokens: int,
    kinds: Sequence[str],
    *,
    generator: torch.Generator | None = None,
    block: int = 128,
    batch: int = 1,
    heads: int = 1,
    device: str | torch.device = "cpu",
) -> SparseSymbols:
    """Return random tiles on and below the diagonal; in PARTIAL tiles each pair attends with probability ½.

    Args:
        kinds: names in ``CODES``; each is chosen with equal probability.
        generator: random generator on ``device``; None = torch's own.
    """
    blocks = block_count(tokens, block)
    tiles = torch.ones(1, 1, blocks, blocks, dtype=torch.bool, device=device).tril()
    choices = torch.tensor([CODES[kind] for kind in kinds], dtype=torch.int32, device=device)
    codes = choices[torch.randint(len(kinds), tiles.shape, generator=generator, device=device)]
    partial_tiles = tiles & (codes == FIRST_PARTIAL_TILE)
    count = int(partial_tiles.sum())
    codes[partial_tiles] += torch.arange(count, dtype=torch.int32, device=device)
    shape = (count, block, block // 8)
    pool = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
    return symbols_of_tiles(tiles, TileMasks(codes, pool), tokens, block, batch, heads)
