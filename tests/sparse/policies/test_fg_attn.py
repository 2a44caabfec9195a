"""FG-Attn's masks: which single keys stay, which tiles are whole, and that attention over them is a masked softmax."""

import math

import pytest
import torch

from dit_accel.kernels import attention, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Skip
from dit_accel.sparse.policies import drawn, plan
from tests.kernels.conftest import DEVICE
from tests.pairs import every_pair

LAYOUTS = {
    "no-text": TokenLayout(0, 300, 64),
    "block-128": TokenLayout(0, 300, 128),
    "text-first": TokenLayout(70, 230, 64),
    "text-last": TokenLayout(70, 230, 64, text_first=False),
    "single-block": TokenLayout(0, 40, 64),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
every_mask = pytest.mark.parametrize("mask", ["exact", "average_query"])


def queries_and_keys(layout: TokenLayout, sharpness: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, layout.tokens, 2, 16, generator=generator) for _ in range(2))
    return (q * sharpness).to(DEVICE), k.to(DEVICE)


def config(**changes) -> Skip:
    return Skip(policy="fg_attn", **changes)


def keys_of(symbols) -> torch.Tensor:
    """Keys that a row attends to in whole tiles or alone, bool ``[B, H, T, S]``."""
    tiles = unpack_bits(symbols.skip_bits, symbols.blocks).repeat_interleave(symbols.block, -1)
    single = unpack_bits(symbols.slice_bits, symbols.blocks * symbols.block)
    assert not (tiles & single).any()
    return (tiles | single)[..., : symbols.tokens].cpu()


def keys_by_definition(q, k, layout, mask, threshold, kv_len) -> torch.Tensor:
    """One query after the other, in float64."""
    batch, tokens, heads, head_dim = q.shape
    keys = torch.zeros(batch, heads, layout.blocks, tokens, dtype=torch.bool)
    text = torch.zeros(layout.blocks, dtype=torch.bool)
    text[layout.text_blocks] = True
    for b in range(batch):
        for h in range(heads):
            valid = k[b, : kv_len[b], h].double().cpu()
            for i in range(layout.blocks):
                rows = q[b, i * layout.block : (i + 1) * layout.block, h].double().cpu()
                for query in rows if mask == "exact" else rows.mean(0, keepdim=True):
                    probability = (valid @ query / math.sqrt(head_dim)).softmax(0)
                    keys[b, h, i, : kv_len[b]] |= probability > threshold / kv_len[b]
    keys[:, :, text] = True
    return keys | text.repeat_interleave(layout.block)[:tokens]


@every_pair(layout=LAYOUTS, mask=("exact", "average_query"), shortened=(False, True))
def test_keys_stay_by_definition(layout, mask, shortened):
    """Keys above 0.5 / N for a query, or 0.1 / N for the mean; text is whole, as is a tile of which all keys stay."""
    q, k = queries_and_keys(layout, sharpness=4.0)
    kv_len = [layout.tokens, layout.tokens - 30 if shortened else layout.tokens]
    limit = torch.tensor(kv_len, dtype=torch.int32, device=DEVICE) if shortened else None
    symbols = drawn(q, k, config(mask=mask), layout=layout, kv_len=limit)
    keys = keys_of(symbols)
    expected = keys_by_definition(q, k, layout, mask, 0.5 if mask == "exact" else 0.1, kv_len)
    for b, length in enumerate(kv_len):  # whether a row holds keys behind the last valid one means nothing
        assert torch.equal(keys[b, ..., :length], expected[b, ..., :length])
    if not shortened:
        padded = torch.nn.functional.pad(expected, (0, -layout.tokens % layout.block), value=True)
        whole = padded.unflatten(-1, (layout.blocks, layout.block)).all(-1)
        assert torch.equal(unpack_bits(symbols.skip_bits, layout.blocks).cpu(), whole)


@every_layout
def test_tiles_that_keep_every_key_are_whole(layout):
    """At a threshold that nothing misses no single key is left over, also in the ragged last tile; and all is dense."""
    q, k = queries_and_keys(layout)
    symbols = drawn(q, k, config(key_threshold=1e-9), layout=layout)
    assert unpack_bits(symbols.skip_bits, layout.blocks).all()
    assert not symbols.slice_bits.any()


@every_mask
def test_attention_of_the_plan_is_the_masked_softmax(mask):
    layout = LAYOUTS["text-first"]
    q, k = queries_and_keys(layout, sharpness=3.0)
    kv_len = torch.tensor([300, 260], dtype=torch.int32, device=DEVICE)
    out = attention(q, k, k, plan(q, k, config(mask=mask), layout=layout, kv_len=kv_len), kv_len=kv_len)
    symbols = drawn(q, k, config(mask=mask), layout=layout, kv_len=kv_len)
    pairs = keys_of(symbols).repeat_interleave(layout.block, 2)[:, :, :300]
    pairs &= torch.arange(300) < kv_len.cpu()[:, None, None, None]
    q, k = q.double().cpu(), k.double().cpu()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    expected = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~pairs, -math.inf).softmax(-1), k)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)


@every_mask
def test_tiles_of_padding_alone_are_not_computed(mask):
    """A tile whose keys are all beyond the sample's end is no whole tile, though each of its valid keys stays."""
    layout = TokenLayout(0, 256, 64)
    q, k = queries_and_keys(layout)
    kv_len = torch.tensor([256, 100], dtype=torch.int32, device=DEVICE)
    symbols = drawn(q, k, config(mask=mask), layout=layout, kv_len=kv_len)
    assert not unpack_bits(symbols.skip_bits, layout.blocks)[1, :, :, 2:].any()
