"""Static masks, made tile by tile, equal their definition for each pair."""

from itertools import pairwise

import pytest
import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import lower, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.tile_masks import mask_from_plan, symbols_from_mask
from dit_accel.kernels.symbols import CAUSAL_TILE, FULL_TILE
from dit_accel.presets import Skip
from dit_accel.sparse.policies import drawn, static

every_block = pytest.mark.parametrize("block", [64, 128])
LENGTHS = [[1], [64], [65], [300], [133, 309, 70], [1, 63, 64, 65, 1, 128], [256, 68, 188], [5] * 40]
every_lengths = pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}-of-{sum(lengths)}")


def mask_of(symbols) -> torch.Tensor:
    """bool [S, S]; the same for all samples and heads."""
    masks = mask_from_plan(lower(symbols))
    assert (masks == masks[:1, :1]).all()
    return masks[0, 0]


@every_block
@every_lengths
def test_segments(lengths, block):
    """Documents attend to themselves, wholly or up to the query; text and images also to all earlier tokens."""
    segment, token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.arange(sum(lengths))
    is_own, is_past = segment == segment[:, None], token <= token[:, None]
    is_text = [number % 2 == 0 for number in range(len(lengths))]
    options = {"block": block, "batch": 2, "heads": 3}
    assert torch.equal(mask_of(static.block_mask_from_segments(lengths, **options)), is_own)
    assert torch.equal(mask_of(static.block_mask_from_segments(lengths, causal=True, **options)), is_own & is_past)
    of_images = is_own & ~torch.tensor(is_text)[segment]
    found = mask_of(static.block_mask_from_segments(lengths, causal=is_text, past=True, **options))
    assert torch.equal(found, is_past | of_images)
    causal = static.block_mask_from_segments([sum(lengths)], causal=True, **options)
    assert torch.equal(mask_of(causal), is_past) and (causal.masks is None or causal.masks.pool.shape[0] == 0)


def test_the_papers_interleaved_tiles():
    """OmniAttention, appendix: segments 133, 309, 70 in blocks of 64, as in the paper's figure."""
    symbols = static.block_mask_from_segments([133, 309, 70], causal=[True, False, True], past=True, block=64)
    letters, computes = {FULL_TILE: "F", CAUSAL_TILE: "C"}, unpack_bits(symbols.skip_bits, 8)[0, 0]
    kinds = [
        "".join(letters.get(code, "P") for code in codes[computes[row]].tolist())
        for row, codes in enumerate(symbols.masks.codes[0, 0])
    ]
    assert kinds == ["C", "FC", "FFPPPPP", *["FFFFFFP"] * 4, "FFFFFFFC"]
    assert symbols.masks.pool.shape[0] == 5  # of 9 PARTIAL tiles


@every_block
@every_lengths
def test_no_two_entries_are_equal_and_no_tile_is_partial_without_need(lengths, block):
    """The symbols equal those of the whole mask, which keeps one of several equal entries."""
    causal = [number % 3 == 0 for number in range(len(lengths))]
    symbols = static.block_mask_from_segments(lengths, causal=causal, block=block)
    expected = symbols_from_mask(mask_of(symbols)[None, None], block=block)
    assert all(torch.equal(one, other) for one, other in zip(symbols.tensors(), expected.tensors(), strict=True))


@pytest.mark.parametrize(
    ("lengths", "causal", "says"),
    [([], False, "lengths must be"), ([4, 0], False, "lengths must be"), ([4, 4], [True], "one entry for each of 2")],
    ids=["none", "empty-segment", "too-few"],
)
def test_segments_that_make_no_sequence_are_refused(lengths, causal, says):
    with pytest.raises(ShapeError, match=says):
        static.block_mask_from_segments(lengths, causal=causal)


LAYOUTS = {
    "no-text": TokenLayout(0, 500, 64),
    "text-first": TokenLayout(100, 400, 64),
    "text-last": TokenLayout(100, 400, 64, text_first=False),
    "block-128": TokenLayout(30, 300, 128),
    "one-block": TokenLayout(3, 30, 128),
}
CONFIGS = {
    "causal": Skip(policy="static", pattern="causal"),
    "sliding-1": Skip(policy="static", window=1),
    "sliding-150": Skip(policy="static", window=150),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def draw_static(layout, config, batch=2, heads=3):
    q = torch.zeros(batch, layout.tokens, heads, 16)
    return drawn(q, q, config, layout=layout)


@every_layout
@every_config
def test_policy(config, layout):
    """Vision attends by the pattern, counted in the sequence; text attends to all, and all attend to text."""
    token = torch.arange(layout.tokens)
    is_vision = (token >= layout.vision_start) & (token < layout.vision_start + layout.vision)
    distance = token - token[:, None]
    if config.pattern == "causal":
        near = distance <= 0
    else:
        before = config.window // 2
        near = (distance >= -before) & (distance < config.window - before)
    expected, symbols = near | ~is_vision | ~is_vision[:, None], draw_static(layout, config)
    assert torch.equal(mask_of(symbols), expected) and unpack_bits(symbols.cache_bits, 3).all()


def test_policy_makes_symbols_once():
    """Every step and site of a layout gets the same tensors; another pattern, layout or batch gets its own."""
    sliding = CONFIGS["sliding-150"]
    first = draw_static(LAYOUTS["text-first"], sliding)
    assert draw_static(TokenLayout(100, 400, 64), Skip(policy="static", window=150)) is first
    others = [
        first,
        draw_static(LAYOUTS["text-first"], CONFIGS["causal"]),
        draw_static(LAYOUTS["text-last"], sliding),
        draw_static(LAYOUTS["text-first"], sliding, batch=1),
    ]
    assert all(one is not other for one, other in pairwise(others))


def test_long_sequences_need_no_square():
    """65536 tokens: a mask over pairs would take 4.3 GB; these symbols take 1.1 MB."""
    symbols = draw_static(TokenLayout(0, 65536), Skip(policy="static", window=4096), batch=1, heads=1)
    assert sum(tensor.numel() * tensor.element_size() for tensor in symbols.tensors()) < 1.2e6
    assert symbols.masks.pool.shape[0] == 2
