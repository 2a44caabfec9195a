"""Skipped tiles join the softmax by their means, weighted by the number of valid keys of the block."""

import pytest
import torch

from dit_accel.kernels import attention, lower, pack_bits
from dit_accel.kernels.symbols import SparseSymbols
from tests.kernels.conftest import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy on the log of an empty sum
CASES = {
    "ragged": {"batch": 2, "heads": 2, "tokens": 130},
    "block-128": {"batch": 1, "heads": 2, "tokens": 260, "block": 128},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 192},
    "no-tiles": {"batch": 1, "heads": 2, "tokens": 200, "rows": 1.1, "tiles": 0.0},
    "all-tiles": {"batch": 1, "heads": 2, "tokens": 130, "rows": 1.1, "tiles": 1.1},
    "many-blocks": {"batch": 1, "heads": 1, "tokens": 64 * 34, "tiles": 0.1},
}
BACKENDS = ["reference", "triton"]


def naive(q, k, v, sparsity, kv_len):
    """Attention, query block by query block, over listed keys and each other block's mean, repeated for its keys."""
    block, tokens = sparsity.plan.block, q.shape[1]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=q.dtype, device=q.device)
    for b, h, row in sparsity.rows.nonzero().tolist():
        keys, values = [], []
        for tile in range(sparsity.plan.blocks):
            end = tokens if kv_len is None else int(kv_len[b])
            of_tile = slice(tile * block, min((tile + 1) * block, end))
            for parts, x in ((keys, k[b, h, of_tile]), (values, v[b, h, of_tile])):
                parts.append(x if sparsity.tiles[b, h, row, tile] else x.mean(0, keepdim=True).expand(len(x), -1))
        rows = slice(row * block, (row + 1) * block)
        scores = q[b, h, rows] @ torch.cat(keys).T * q.shape[-1] ** -0.5
        out[b, h, rows], lse[b, h, rows] = scores.softmax(-1) @ torch.cat(values), scores.logsumexp(-1)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [False, True], ids=["all-keys", "kv-len"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_means_equal_blocks_of_equal_keys(make_sparsity, case, lengths, backend):
    """Computed rows include the mean of each skipped block, weighted by its number of keys; other rows stay."""
    sparsity = make_sparsity(**case)
    generator = torch.Generator().manual_seed(0)
    shape = (case["batch"], case["tokens"], case["heads"], 32)
    q, k, v = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(3))
    kv_len = torch.tensor([case["tokens"] - 37] * case["batch"], dtype=torch.int32, device=DEVICE) if lengths else None
    out = torch.full_like(q, torch.nan)
    out_with_means, lse = attention(
        q, k, v, sparsity.plan, kv_len=kv_len, tile_means=True, return_lse=True, out=out, backend=backend
    )
    expected, expected_lse = naive(q, k, v, sparsity, kv_len)
    computes = sparsity.rows.repeat_interleave(sparsity.plan.block, 2)[..., : case["tokens"]].transpose(1, 2)
    expected[~computes] = torch.nan
    torch.testing.assert_close(out_with_means, expected.float(), atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_share_the_means_of_their_keys(make_sparsity, backend):
    """Grouped queries, half precision and strided inputs."""
    sparsity = make_sparsity(batch=1, heads=4, tokens=200)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 200, 64, generator=generator).to(DEVICE, torch.float16).transpose(1, 2)
    k, v = (torch.randn(1, 200, 2, 64, generator=generator).to(DEVICE, torch.float16) for _ in range(2))
    out_with_means = attention(q, k, v, sparsity.plan, tile_means=True, out=torch.zeros_like(q), backend=backend)
    expected, _ = naive(q, k, v, sparsity, None)
    torch.testing.assert_close(out_with_means.float(), expected.float(), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_are_their_mean_cost_nothing(backend):
    """If all keys and values of a block are equal, skipping tiles by their means changes nothing."""
    tokens, block = 64 * 4, 64
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, tokens, 2, 32, generator=generator).to(DEVICE)
    k, v = (torch.randn(1, 4, 2, 32, generator=generator).to(DEVICE).repeat_interleave(block, 1) for _ in range(2))
    kept = torch.eye(4, dtype=torch.bool, device=DEVICE).expand(1, 2, 4, 4)
    every_row = pack_bits(torch.ones(1, 4, 2, dtype=torch.bool, device=DEVICE))
    few, every = (
        lower(SparseSymbols(every_row, pack_bits(tiles), heads=2, tokens=tokens, block=block))
        for tiles in (kept, torch.ones_like(kept))
    )
    out_with_means = attention(q, k, v, few, tile_means=True, backend=backend)
    torch.testing.assert_close(out_with_means, attention(q, k, v, every, backend=backend), atol=1e-5, rtol=1e-5)
