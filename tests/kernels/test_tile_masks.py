"""Masks over pairs convert to symbols and back; every tile gets the cheapest kind that represents its mask."""

import torch

from dit_accel.kernels import unpack_bits
from dit_accel.kernels.plans.tile_masks import mask_from_plan, plan_from_mask, symbols_from_intervals, symbols_from_mask
from dit_accel.kernels.symbols import CAUSAL_TILE, FIRST_PARTIAL_TILE, FULL_TILE
from tests.kernels.naive_attention import attending
from tests.pairs import every_pair

LENGTHS = (1, 63, 64, 65, 129, 200, 256, 300)


def mixed(tokens: int, batch: int = 1, heads: int = 1) -> torch.Tensor:
    """bool [B, H, S, S]: squares of 64 x 64 pairs of all kinds, a query without keys, a key without queries."""
    generator = torch.Generator().manual_seed(1)
    kind = torch.randint(0, 4, (batch, heads, 5, 5), generator=generator)
    kind[:, :, 0, 0] = kind[:, :, 2, 2] = 3
    token = torch.arange(tokens)
    kind = kind[:, :, (token // 64)[:, None], (token // 64)[None]]
    mask = torch.rand(kind.shape, generator=generator) < torch.tensor([0.0, 2.0, 0.5])[kind.clamp(max=2)]
    mask = torch.where(kind == 3, token <= token[:, None], mask)
    mask[:, :, 70:71] = mask[..., 71:72] = False
    return mask


def kind_by_definition(pairs: torch.Tensor, is_diagonal: bool) -> str:
    """Kind of a tile from its pairs inside the sequence, bool [queries, keys]."""
    if not pairs.any():
        return "skipped"
    if pairs.all():
        return "full"
    return "causal" if is_diagonal and torch.equal(pairs, torch.ones_like(pairs).tril()) else "partial"


@every_pair(tokens=LENGTHS, block=(64, 128), axes=((1, 1), (2, 1), (1, 3), (2, 3)))
def test_a_mask_comes_back_for_all_samples_and_heads(tokens, block, axes):
    mask = mixed(tokens, *axes)
    plan = plan_from_mask(mask, block=block, batch=2, heads=3)
    assert plan.masks is None or plan.masks.codes.shape[:2] == axes
    assert torch.equal(mask_from_plan(plan), mask.expand(2, 3, -1, -1))


@every_pair(tokens=LENGTHS, block=(64, 128))
def test_each_tile_is_of_the_cheapest_kind(tokens, block):
    """Skipped, FULL or CAUSAL where the definition says so, PARTIAL nowhere else; and every row computes."""
    mask = mixed(tokens, heads=2)
    symbols = symbols_from_mask(mask, block=block)
    assert unpack_bits(symbols.cache_bits, 2).all()
    computes, seen = unpack_bits(symbols.skip_bits, symbols.blocks), set()
    for head in range(2):
        for row in range(symbols.blocks):
            for column in range(symbols.blocks):
                kind = kind_by_definition(mask[0, head, row * block :, column * block :][:block, :block], row == column)
                seen.add(kind)
                code = FULL_TILE if symbols.masks is None else symbols.masks.codes[0, head, row, column].item()
                assert computes[0, head, row, column] == (kind != "skipped")
                if kind != "skipped":
                    assert {"full": FULL_TILE, "causal": CAUSAL_TILE}.get(kind, FIRST_PARTIAL_TILE) == min(code, 2)
    if tokens == 300 and block == 64:
        assert seen == {"skipped", "full", "causal", "partial"}


def test_equal_tiles_share_an_entry():
    """3 of 6 PARTIAL tiles in 2 heads differ; a ragged tile equals a full one only if all its pairs do."""
    tile = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = torch.zeros(1, 2, 150, 150, dtype=torch.bool)
    mask[0, 0, :64, :64] = mask[0, 0, 64:128, :64] = mask[0, 1, :64, 64:128] = tile
    mask[0, :, 128:, 128:] = tile[:22, :22]
    mask[0, 1, 64:128, 64:128] = ~tile
    masks = symbols_from_mask(mask, block=64).masks
    assert masks.pool.shape == (3, 64, 8)
    codes = masks.codes
    assert codes[0, 0, 0, 0] == codes[0, 0, 1, 0] == codes[0, 1, 0, 1] != codes[0, 1, 1, 1]
    assert codes[0, 0, 2, 2] == codes[0, 1, 2, 2]


def test_a_mask_of_whole_tiles_has_no_masks():
    """Backends without mask support can run it."""
    mask = torch.zeros(1, 1, 192, 192, dtype=torch.bool)
    mask[..., 64:128, :] = mask[..., :64] = True
    assert symbols_from_mask(mask, block=64).masks is None
    assert symbols_from_mask(torch.zeros_like(mask), block=64).masks is None
    assert not mask_from_plan(plan_from_mask(torch.zeros_like(mask), block=64)).any()


@every_pair(tokens=LENGTHS, block=(64, 128), runs=(1, 2))
def test_runs_of_keys_give_the_symbols_of_their_mask(runs, tokens, block):
    """Equal to the mask's symbols bit by bit; runs may be empty, touch each other and extend beyond the sequence."""
    generator = torch.Generator().manual_seed(tokens)
    bounds = torch.randint(-30, tokens + 30, (tokens, 2 * runs), generator=generator).sort(-1).values
    first, end = bounds[:, ::2], bounds[:, 1::2]
    end[::4, 0] = first[::4, 0]  # empty
    if runs == 2:
        first[1::3, 1] = end[1::3, 0]  # touching
    key = torch.arange(tokens)
    mask = ((key >= first[..., None]) & (key < end[..., None])).any(1)[None, None]
    expected = symbols_from_mask(mask, block=block, batch=2, heads=3)
    actual = symbols_from_intervals(first, end, block=block, batch=2, heads=3)
    for tensor, expected_tensor in zip(actual.tensors(), expected.tensors(), strict=True):
        assert torch.equal(tensor, expected_tensor)


def test_a_plan_has_the_pairs_of_its_symbols(make_sparsity):
    """None in reused rows; single keys of the others."""
    sparsity = make_sparsity(2, 3, 200, rows=0.5, masked=0.5, keys=0.3)
    assert torch.equal(mask_from_plan(sparsity.plan), attending(sparsity))
