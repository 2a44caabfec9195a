"""SLA's classes, chosen from queries and keys by the shares of a preset."""

import pytest
import torch

from dit_accel.kernels import classify_tiles, pooled_map, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Skip
from dit_accel.sparse.policies import drawn

BLOCK = 64
CONFIG = Skip(policy="sla", critical=0.2, negligible=0.3)
LAYOUTS = {
    "no-text": TokenLayout(0, 800, BLOCK),
    "text-first": TokenLayout(100, 700, BLOCK),
    "text-last": TokenLayout(100, 700, BLOCK, text_first=False),
}


def features(seed: int) -> torch.Tensor:
    return torch.randn(2, 800, 3, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_classes_come_from_the_pooled_map(layout):
    """Every row is computed; with text, its rows and columns are critical and the shares apply to the others."""
    q, k = features(0), features(1)
    symbols = drawn(q, k, CONFIG, layout=layout)
    assert unpack_bits(symbols.cache_bits, 3).all()
    expected = classify_tiles(pooled_map(q, k, BLOCK).probabilities, 0.2, 0.3, always=layout.text_blocks)
    assert torch.equal(symbols.skip_bits, expected[0]) and torch.equal(symbols.linear_bits, expected[1])
    critical, marginal = (unpack_bits(bits, layout.blocks) for bits in expected)
    assert critical[..., layout.text_blocks].all() and critical[:, :, layout.text_blocks].all()
    vision = layout.vision_blocks
    count = vision.stop - vision.start
    most, least = round(0.2 * count), round(0.3 * count)
    assert (critical[:, :, vision, vision].sum(-1) == most).all()
    assert (marginal[:, :, vision, vision].sum(-1) == count - most - least).all()


@pytest.mark.parametrize("valid", [1, 63, 64, 65, 320, 321, 384, 385, 799, 800])
def test_padding_is_in_no_class(valid):
    """Rows of a padded sample have the classes that they have without padding, and no tile of padding alone has one.

    A tile that holds one valid key is a tile of the sample.
    """
    layout, kv_len = LAYOUTS["no-text"], torch.tensor([800, valid], dtype=torch.int32)
    q, k = features(0), features(1)
    padded = drawn(q, k, CONFIG, layout=layout, kv_len=kv_len)
    alone = drawn(q[1:, :valid], k[1:, :valid], CONFIG, layout=TokenLayout(0, valid, BLOCK), kv_len=None)
    blocks, whole = -(-valid // BLOCK), valid // BLOCK  # the mean query of a block that ends in padding has it in it
    for bits, expected in ((padded.skip_bits, alone.skip_bits), (padded.linear_bits, alone.linear_bits)):
        tiles = unpack_bits(bits, layout.blocks)[1]
        assert not tiles[..., blocks:].any()
        assert torch.equal(tiles[:, :whole, :blocks], unpack_bits(expected, blocks)[0, :, :whole])
