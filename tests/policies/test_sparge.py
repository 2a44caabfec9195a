"""SpargeAttn's tiles: the kept mass, row by row, and what is always kept."""

from itertools import pairwise

import pytest
import torch

from dit_accel.kernels.packing import unpack_bits
from dit_accel.layout import TokenLayout
from dit_accel.policies.sparge import tile_bits

BLOCK = 64
NO_TEXT = TokenLayout(0, 800, BLOCK)  # 13 blocks
LAYOUTS = {
    "no-text": NO_TEXT,
    "text-first": TokenLayout(100, 700, BLOCK),
    "text-last": TokenLayout(100, 700, BLOCK, text_first=False),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
ROUNDING = 13 * 2**-30  # masses are counted in units of 2^-30, rounded up


def pooled(layout: TokenLayout, sharpness: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, layout.blocks, layout.blocks, generator=generator).mul(sharpness).softmax(-1)


def tile_mask(probabilities: torch.Tensor, layout: TokenLayout, tau_kv: float) -> torch.Tensor:
    return unpack_bits(tile_bits(probabilities, layout, tau_kv), layout.blocks)


def kept_by_definition(row: list[float], tau_kv: float) -> set[int]:
    """From the largest down until the mass reaches 1 − tau_kv."""
    kept, mass = set(), 0.0
    for j in sorted(range(len(row)), key=lambda j: -row[j]):
        if kept and mass >= (1 - tau_kv) * sum(row):
            break
        kept.add(j)
        mass += row[j]
    return kept


@pytest.mark.parametrize("tau_kv", [0.05, 0.15, 0.5, 0.9])
@every_layout
def test_tiles_are_kept_until_their_mass_suffices(layout, tau_kv):
    """Each row keeps its largest tiles until they reach 1 − tau_kv; tiles in text rows and columns are all kept."""
    probabilities = pooled(layout)
    tiles = tile_mask(probabilities, layout, tau_kv)
    indices = range(layout.blocks)
    text = set(indices[layout.text_blocks])
    for b in range(2):
        for h in range(3):
            for i in indices:
                row = probabilities[b, h, i].double().tolist()
                expected = set(indices) if i in text else kept_by_definition(row, tau_kv) | text
                assert set(tiles[b, h, i].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("tau_kv", [0.05, 0.15, 0.5])
def test_kept_mass_reaches_its_share_and_no_tile_is_spare(tau_kv):
    """The kept mass is at least 1 − tau_kv, and without its smallest tile it is not."""
    probabilities = pooled(NO_TEXT)
    tiles = tile_mask(probabilities, NO_TEXT, tau_kv)
    mass = (probabilities.double() * tiles).sum(-1)
    smallest = probabilities.double().masked_fill(~tiles, 2.0).amin(-1)
    total = probabilities.double().sum(-1)
    assert (mass >= (1 - tau_kv) * total - ROUNDING).all()
    assert (mass - smallest < (1 - tau_kv) * total + ROUNDING).all()


@pytest.mark.parametrize("tau_kv", [0.5, 0.999, 1.0])
def test_every_row_keeps_a_tile(tau_kv):
    """A row that computes has at least its largest tile, whatever it may lose."""
    probabilities = pooled(NO_TEXT, sharpness=8.0)
    tiles = tile_mask(probabilities, NO_TEXT, tau_kv)
    assert tiles.gather(-1, probabilities.argmax(-1, keepdim=True)).all()


@pytest.mark.parametrize("sharpness", [1.0, 6.0], ids=["flat", "peaked"])
def test_threshold_0_keeps_every_tile_of_positive_mass(sharpness):
    """A row that may lose nothing loses nothing, however small a tile is."""
    probabilities = pooled(NO_TEXT, sharpness)
    assert tile_mask(probabilities, NO_TEXT, 0.0)[probabilities > 0].all()


def test_larger_threshold_keeps_no_more():
    """What a threshold drops, every larger one drops too."""
    probabilities = pooled(NO_TEXT)
    tiles = [tile_mask(probabilities, NO_TEXT, tau / 10) for tau in range(10)]
    assert all((large <= small).all() for small, large in pairwise(tiles))
    assert tiles[1].sum() > tiles[5].sum()
