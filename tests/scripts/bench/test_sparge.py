"""Benchmark of SpargeAttn: its random inputs have tiles to skip, and its plot shows shares of attention's time."""

import pytest
import torch

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout
from scripts.bench.kernels import plot, sparge
from scripts.bench.kernels.cases import Case, make_inputs

CASE = Case(1300, heads=2, head_dim=64, block=64, dtype=torch.float32)


def test_blocks_have_directions_but_for_one_in_ten():
    """One block in ten is dissimilar and computed whole; of the other tiles most are skipped."""
    inputs = make_inputs(CASE, "cpu")
    q, k = sparge._clustered(inputs), sparge._clustered(inputs)
    pooled = kernels.pooled_map(q, k, CASE.block)
    unlike = torch.arange(21) % 10 == 1
    for similarity in (pooled.q_similarity, pooled.k_similarity):
        assert ((similarity < sparge.SIMILARITY) == unlike).all()
    tiles = kernels.unpack_bits(sparge._symbols(q, pooled, TokenLayout(0, CASE.tokens, CASE.block)).skip_bits, 21)
    assert tiles[:, :, unlike].all() and tiles[..., unlike].all()
    assert tiles[:, :, ~unlike][..., ~unlike].float().mean() < 0.5


def test_shares_are_drawn_by_tokens_beside_the_papers():
    """A line a part, its share of dense attention's time over tokens, and table 3 of the paper."""
    rows = [
        {
            "op": "sparge prediction",
            "kind": kind,
            "shape": {"tokens": tokens, "heads": 24},
            "speedup": {"cudnn": tokens / cost},
        }
        for tokens, paper in ((16384, " (paper 1.82%)"), (8192, " (paper 3.78%)"))
        for kind, cost in ((f"whole{paper}", 400), ("lowering", 40))
    ]
    (panel,) = plot._share_panels(rows)
    lines = {line.label: dict(line.points) for line in panel.lines}
    assert lines["whole"] == pytest.approx({8192: 400 / 8192, 16384: 400 / 16384})
    assert lines["lowering"] == pytest.approx({8192: 40 / 8192, 16384: 40 / 16384})
    assert lines["SpargeAttn, table 3"] == sparge.PAPER_SHARES
