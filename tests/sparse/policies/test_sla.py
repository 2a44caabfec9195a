"""SLA's classes, drawn from queries and keys by the shares of a preset."""

import pytest
import torch

from dit_accel.kernels import classify_tiles, pooled_map, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Skip
from dit_accel.sparse.policies import draw, plan

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
    """Every row computes; with text, its rows and columns are critical and the shares are those of the others."""
    q, k = features(0), features(1)
    symbols = draw(q, k, layout, CONFIG)
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


def test_a_map_that_is_there_is_not_made_again():
    """Classes follow the map that is passed, whatever q and k are."""
    layout, q = LAYOUTS["no-text"], features(0)
    pooled = pooled_map(q, features(1), BLOCK)
    assert torch.equal(
        draw(q, features(2), layout, CONFIG, pooled=pooled).linear_bits,
        draw(q, features(1), layout, CONFIG).linear_bits,
    )


def test_padding_is_in_no_class():
    """Tiles that hold valid keys share the classes among them."""
    layout, kv_len = LAYOUTS["no-text"], torch.tensor([800, 321], dtype=torch.int32)
    symbols = draw(features(0), features(1), layout, CONFIG, kv_len=kv_len)
    critical, marginal = (unpack_bits(bits, 13) for bits in (symbols.skip_bits, symbols.linear_bits))
    assert not (critical | marginal)[1, ..., 6:].any()
    assert (critical[1].sum(-1) == 1).all() and (marginal[1].sum(-1) == 6 - 1 - 2).all()


def test_the_functional_form_gives_the_plan():
    """Critical tiles are listed, and marginal ones go along as bits."""
    q, k = features(0), features(1)
    layout = TokenLayout(0, 800)
    made = plan(q, k, CONFIG)
    symbols = draw(q, k, layout, CONFIG)
    assert torch.equal(made.linear_bits, symbols.linear_bits)
    assert torch.equal(made.kv_count, unpack_bits(symbols.skip_bits, layout.blocks).sum(-1).int())
