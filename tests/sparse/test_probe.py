"""The probe: the rows that it measures, their error against dense attention in float64, and the rule that follows."""

import math

import pytest
import torch

from dit_accel.kernels.layout import TokenLayout
from dit_accel.sparse.probe import adjusted, attention_error, probed_rows

LAYOUTS = {
    "no-text": TokenLayout(0, 1000, 64),
    "text-first": TokenLayout(100, 900, 64),
    "text-last": TokenLayout(100, 900, 128, text_first=False),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("count", [1, 3, 4, 100])
def test_every_row_without_text_has_its_turn(layout, count):
    """After enough turns each block of the image has been measured, the ragged tail exactly, text never."""
    blocks = range(layout.blocks)[layout.vision_blocks]
    expected = {block: min((block + 1) * layout.block, layout.tokens) for block in blocks}
    seen = {}
    for turn in range(7, 7 + math.ceil(len(blocks) / count)):
        rows = probed_rows(layout, count, turn)
        starts = [row.start // layout.block for row in rows]
        assert starts == sorted(set(starts)) and len(starts) == min(count, len(blocks))
        seen |= {row.start // layout.block: row.stop for row in rows}
    assert seen == expected


def test_a_sequence_of_text_blocks_has_no_rows():
    """All tiles of such a sequence are computed, and the error is 0."""
    layout, o = TokenLayout(50, 20, 64, text_first=False), torch.randn(1, 70, 2, 16)
    assert probed_rows(layout, 4, 1) == [] and attention_error(o, o, o, o, []).tolist() == [0.0]


@pytest.mark.parametrize("kv_len", [None, [180, 131]], ids=["whole", "ragged"])
def test_error_is_that_of_the_rows_against_dense_attention(kv_len):
    """Relative L2 over the rows' queries and all heads, of the worst sample; other rows don't count."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 180, 3, 16, generator=generator) for _ in range(3))
    dense = torch.empty(2, 180, 3, 16, dtype=torch.float64)
    for b in range(2):
        keys = slice(0, 180 if kv_len is None else kv_len[b])
        for h in range(3):
            scores = q[b, :, h].double() @ k[b, keys, h].double().T / 4
            dense[b, :, h] = scores.softmax(-1) @ v[b, keys, h].double()
    rows = [slice(0, 64), slice(128, 180)]
    noise = torch.randn(2, 180, 3, 16, generator=generator) * torch.tensor([0.1, 0.2]).view(2, 1, 1, 1)
    o = dense.float() + noise
    o[:, 64:128] = torch.nan
    expected = max(
        math.sqrt(sum((noise[b, r].double() ** 2).sum() for r in rows) / sum((dense[b, r] ** 2).sum() for r in rows))
        for b in range(2)
    )
    lengths = None if kv_len is None else torch.tensor(kv_len, dtype=torch.int32)
    error = attention_error(o, q, k, v, rows, kv_len=lengths)
    assert error.dtype == torch.float32 and error.shape == (1,)
    assert error.item() == pytest.approx(expected, rel=1e-4)


# The rule


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.8])
def test_growth_converges_to_the_target(power):
    """With e = c · g^p, the error converges to the target from either side, for every power below 4."""
    for growth in (1.0, 0.01):
        for _ in range(40):
            growth = adjusted(growth, 0.5 * growth**power, 0.02)
        assert 0.5 * growth**power == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize(
    ("growth", "error", "following"),
    [
        (1.0, 0.001, 1.0),
        (0.9, 0.001, 1.0),
        (0.4, 0.0, 0.5),
        *((0.8, wrong, 0.4) for wrong in (math.nan, math.inf, 1e9)),
    ],
)
def test_one_step_of_the_rule(growth, error, following):
    """Growth never passes the preset's, rises by a quarter at most, and halves at an error that is no number."""
    assert adjusted(growth, error, 0.1) == following
