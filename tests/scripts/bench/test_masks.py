"""Random masks inside tiles, of the benchmark."""

import pytest
import torch

from dit_accel.kernels import lower, unpack_bits
from dit_accel.kernels.symbols import FIRST_PARTIAL_TILE
from dit_accel.kernels.tile_masks import mask_from_plan
from scripts.bench.kernels.masks import CODES, random_tiles


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kinds", [("full", "partial"), ("full", "causal", "partial"), ("causal",)], ids="-".join)
def test_random_tiles(kinds, block):
    """Tiles on and below the diagonal, of the kinds asked for; half the pairs of a PARTIAL one, other ones in each."""
    symbols = random_tiles(10 * block - 20, kinds, generator=torch.Generator().manual_seed(0), block=block)
    computes = unpack_bits(symbols.skip_bits, 10)[0, 0]
    assert torch.equal(computes, torch.ones(10, 10, dtype=torch.bool).tril())
    codes = symbols.masks.codes[0, 0][computes]
    assert set(codes.clamp(max=FIRST_PARTIAL_TILE).tolist()) == {CODES[kind] for kind in kinds}
    pool = unpack_bits(symbols.masks.pool, block)
    assert len(pool) == (codes >= FIRST_PARTIAL_TILE).sum() == len({entry.numpy().tobytes() for entry in pool})
    if len(pool):
        assert 0.45 < pool.float().mean() < 0.55
    again = random_tiles(10 * block - 20, kinds, generator=torch.Generator().manual_seed(0), block=block)
    assert torch.equal(*(mask_from_plan(lower(each)) for each in (again, symbols)))
