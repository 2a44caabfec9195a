"""A policy of one's own, made as CONTRIBUTING.md says: its function, its section, one line in the table, its tests.

It keeps a diagonal band of tiles, and the tiles that hold text. The fixture adds it to the table and takes it off.
"""

import math
from typing import Literal

import pytest
import torch
from pydantic import Field

from dit_accel.errors import UnsupportedError
from dit_accel.kernels import attention, pack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.presets import Skip
from dit_accel.sparse.policies import POLICIES, plan
from dit_accel.sparse.policies.dense import every_row


def symbols(q, k, layout, config, *, kv_len=None, pooled=None):
    """Tiles at most ``config.reach`` from the diagonal; arguments as for :func:`dit_accel.sparse.policies.draw`."""
    block = torch.arange(layout.blocks, device=q.device)
    tiles = (block - block[:, None]).abs() <= config.reach
    tiles[layout.text_blocks], tiles[:, layout.text_blocks] = True, True
    skip_bits = pack_bits(tiles.expand(q.shape[0], q.shape[2], -1, -1))
    return SparseSymbols(every_row(q, layout), skip_bits, q.shape[2], layout.tokens, layout.block)


class Band(Skip):
    """Keys of policy ``band``."""

    policy: Literal["band"] = "band"
    reach: int = Field(default=1, ge=0)
    """band: tiles on either side of the diagonal."""


LAYOUTS = {
    "no-text": TokenLayout(0, 800, 64),
    "text-first": TokenLayout(100, 700, 64),
    "text-last": TokenLayout(100, 700, 64, text_first=False),
    "block-128": TokenLayout(30, 770, 128),
}


@pytest.fixture
def band():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "band", symbols)
        yield
    assert "band" not in POLICIES


def naive(q, k, v, layout, reach, kv_len):
    """Attention in float64 by a mask over pairs of tokens; one sample and head at a time."""
    token = torch.arange(layout.tokens)
    block = token // layout.block
    holds_text = torch.zeros(layout.blocks, dtype=torch.bool)
    is_text = (token < layout.vision_start) | (token >= layout.vision_start + layout.vision)
    holds_text[block[is_text]] = True
    attends = (block - block[:, None]).abs() <= reach
    attends |= holds_text[block] | holds_text[block][:, None]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for sample in range(q.shape[0]):
        valid = attends & (token < kv_len[sample])
        for head in range(q.shape[2]):
            q_h, k_h, v_h = (x[sample, :, head].double() for x in (q, k, v))
            scores = (q_h @ k_h.T / math.sqrt(q.shape[-1])).masked_fill(~valid, -math.inf)
            out[sample, :, head] = scores.softmax(-1).nan_to_num(0.0) @ v_h
    return out


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("reach", [0, 1, 20], ids=lambda reach: f"reach-{reach}")
def test_attention_under_the_plan_is_the_naive_one(layout, reach, band):
    """Ragged blocks, two samples of which one is padded, three heads; rows without a key give zeros."""
    q, k, v = torch.randn(3, 2, layout.tokens, 3, 16, generator=torch.Generator().manual_seed(0))
    kv_len = torch.tensor([layout.tokens, 500], dtype=torch.int32)
    drawn = plan(q, k, Band(reach=reach), layout=layout, kv_len=kv_len)
    expected = naive(q, k, v, layout, reach, kv_len)
    torch.testing.assert_close(attention(q, k, v, drawn, kv_len=kv_len).double(), expected, rtol=1e-5, atol=1e-5)
    everything = drawn.kv_count.sum() == drawn.kv_index.numel()
    assert bool(everything) == (reach == 20)


def test_what_is_no_section_is_told():
    """A policy's name is not enough."""
    q = torch.zeros(1, 64, 1, 16)
    with pytest.raises(UnsupportedError, match=r"config must be a section skip, such as .*, got 'sparge'$"):
        plan(q, q, "sparge")


def test_keys_are_checked():
    """A value out of range and a key of another policy are errors."""
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Band(reach=-1)
    with pytest.raises(ValueError, match="belongs to policy 'sparge'"):
        Band(similarity=0.5)
