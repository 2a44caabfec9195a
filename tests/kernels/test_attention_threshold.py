"""Attention with a threshold equals dense attention in float64 without the tiles that it leaves out."""

from dataclasses import replace

import pytest
import torch

from dit_accel.kernels import attention, lower, pack_bits
from dit_accel.kernels.symbols import FIRST_PARTIAL_TILE, TileMasks
from tests.kernels.naive_attention import attending, check


def levelled(levels, tokens, block, device, batch=1, heads=1):
    """Half-precision q, k, v whose scaled scores in key block j are about ``levels[j]``, for every query."""
    generator = torch.Generator().manual_seed(0)
    level = torch.tensor(levels).repeat_interleave(block)[:tokens]
    q, k, v = (torch.randn(batch, tokens, heads, 16, generator=generator) for _ in range(3))
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 4.0, level[:, None]  # scale 1/4 makes the scores levels
    return [x.half().to(device) for x in (q, k, v)]


def without(sparsity, tile):
    """Attended pairs without a key block."""
    pairs, block = attending(sparsity).clone(), sparsity.plan.block
    pairs[:, :, :, tile * block : (tile + 1) * block] = False
    return pairs


THRESHOLDS = {
    "left-out": ([0.0, -6.0, -1.0, 0.0], 1),
    "last-tile-stays": ([0.0, -1.0, -1.0, -6.0], None),
    "first-tile-stays": ([-6.0, -1.0, 0.0, 0.0], None),
    "nearer-than-that": ([0.0, -2.0, -1.0, 0.0], None),
    "behind-the-best-so-far": ([-6.0, 0.0, -5.0, 4.0], 2),
    "queries-beyond-the-sequence": ([-1.0, -9.0, -1.0, -1.0], 1),  # have scores of 0, and no say
}


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("levels", "left_out"), THRESHOLDS.values(), ids=THRESHOLDS.keys())
def test_a_threshold_leaves_tiles_out(levels, left_out, block, backend, device, make_sparsity):
    """The result is exactly the softmax without the skipped tiles, including its lse."""
    tokens = 4 * block - 62  # two queries in the last half of a block
    sparsity = make_sparsity(1, 1, tokens, block=block, rows=1.1, tiles=1.1)
    q, k, v = levelled(levels, tokens, block, device)
    pairs = attending(sparsity) if left_out is None else without(sparsity, left_out)
    check(q, k, v, sparsity, backend, pairs=pairs, pv_threshold=-3.0)


def test_64_queries_decide_for_themselves(backend, device, make_sparsity):
    """In a block of 128, one query of the first 64 keeps the tile for these, and the others skip it."""
    sparsity = make_sparsity(1, 1, 512, block=128, rows=1.1, tiles=1.1)
    q, k, v = levelled([0.0, -6.0, -1.0, 0.0], 512, 128, device)
    q[:, 37, :, 0] = 0
    pairs = attending(sparsity).clone()
    pairs[:, :, 64:] = without(sparsity, 1)[:, :, 64:]
    check(q, k, v, sparsity, backend, pairs=pairs, pv_threshold=-3.0)


def test_a_threshold_with_kv_len(backend, device, make_sparsity):
    """The last tile that has a key stays, even if it is not the last of the list."""
    sparsity = make_sparsity(2, 1, 256, rows=1.1, tiles=1.1)
    q, k, v = levelled([0.0, -6.0, -6.0, 0.0], 256, 64, device, batch=2)
    kv_len = torch.tensor([150, 256], dtype=torch.int32, device=device)
    pairs = without(sparsity, 1)
    pairs[1] = without(sparsity, 2)[1] & pairs[1]
    check(q, k, v, sparsity, backend, pairs=pairs, pv_threshold=-3.0, kv_len=kv_len)


def test_a_threshold_with_masks(backend, device, make_sparsity):
    """A query that a tile masks has no say there, and masked tiles come last: tile 1 goes, and tile 0 stays."""
    full = make_sparsity(1, 1, 256, rows=1.1, tiles=1.1)
    pool = torch.ones(2, 64, 64, dtype=torch.bool, device=device)
    pool[1, 5] = False
    codes = torch.zeros(1, 1, 4, 4, dtype=torch.int32, device=device)
    codes[..., 0], codes[..., 1] = FIRST_PARTIAL_TILE, FIRST_PARTIAL_TILE + 1
    symbols = replace(full.symbols, masks=TileMasks(codes, pack_bits(pool, backend="reference")))
    q, k, v = levelled([0.0, -6.0, -1.0, -1.0], 256, 64, device)
    q[:, 5::64, :, 0] = 0  # these would object
    sparsity = full._replace(symbols=symbols, plan=lower(symbols, backend="reference"))
    assert sparsity.plan.kv_index[0, 0, 0].tolist() == [2, 3, 0, 1]
    check(q, k, v, sparsity, backend, pv_threshold=-3.0)  # tile 1 is the row's last

    codes[..., 0], codes[..., 1] = 0, FIRST_PARTIAL_TILE + 1
    codes[..., 2] = FIRST_PARTIAL_TILE
    sparsity = full._replace(symbols=symbols, plan=lower(symbols, backend="reference"))
    assert sparsity.plan.kv_index[0, 0, 0].tolist() == [0, 3, 1, 2]
    check(q, k, v, sparsity, backend, pairs=without(sparsity, 1), pv_threshold=-3.0)


@pytest.mark.parametrize(("block", "masked"), [(64, None), (128, 0.5)], ids=["full", "masked"])
def test_both_backends_leave_out_the_same_tiles(block, masked, device, make_sparsity):
    """The skipped tiles depend on row, head, group of queries and order."""
    tokens = 5 * block + 50
    q, k, v = levelled([2.0, 5.0, 3.0, 6.0, 1.0, 4.0], tokens, block, device, heads=3)
    q[..., 0] *= torch.linspace(0.4, 1, tokens, device=device)[:, None]
    plan = make_sparsity(1, 3, tokens, block=block, rows=1.1, tiles=0.7, masked=masked).plan
    kept = attention(q.float(), k.float(), v.float(), plan, backend="reference")
    expected = attention(q.float(), k.float(), v.float(), plan, pv_threshold=-1.5, backend="reference")
    assert (expected - kept).abs().max() > 0.01  # the threshold does leave tiles out
    out = attention(q, k, v, plan, pv_threshold=-1.5, backend="triton")
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
