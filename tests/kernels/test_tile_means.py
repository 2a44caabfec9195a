"""Skipped tiles join the softmax by their means, weighted by the number of valid keys of the block."""

import torch

from dit_accel.kernels import attention
from tests.kernels.conftest import BACKENDS
from tests.pairs import every_pair

CASES = {
    "ragged": {"batch": 2, "heads": 2, "tokens": 130},
    "block-128": {"batch": 1, "heads": 2, "tokens": 260, "block": 128},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 192},
    "no-tiles": {"batch": 1, "heads": 2, "tokens": 200, "rows": 1.1, "tiles": 0.0},
    "all-tiles": {"batch": 1, "heads": 2, "tokens": 130, "rows": 1.1, "tiles": 1.1},
    "many-blocks": {"batch": 1, "heads": 1, "tokens": 64 * 34, "tiles": 0.1},
}


def naive(q, k, v, sparsity, kv_len):
    """Attention, query block by query block, over listed keys and each other block's mean, repeated for its keys."""
    block, tokens = sparsity.plan.block, q.shape[1]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], -torch.inf, dtype=q.dtype, device=q.device)
    for b, h, row in sparsity.rows.nonzero().tolist():
        keys, values = [], []
        for tile in range(sparsity.plan.blocks):
            of_tile = slice(tile * block, min((tile + 1) * block, tokens if kv_len is None else int(kv_len[b])))
            for parts, x in ((keys, k[b, h, of_tile]), (values, v[b, h, of_tile])):
                parts.append(x if sparsity.tiles[b, h, row, tile] else x.mean(0, keepdim=True).expand(len(x), -1))
        rows = slice(row * block, (row + 1) * block)
        scores = q[b, h, rows] @ torch.cat(keys).T * q.shape[-1] ** -0.5
        out[b, h, rows], lse[b, h, rows] = scores.softmax(-1) @ torch.cat(values), scores.logsumexp(-1)
    return out.transpose(1, 2), lse


@every_pair(case=CASES, has_lengths=(False, True), backend=BACKENDS)
def test_means_stand_for_the_keys_of_their_blocks(case, has_lengths, backend, make_tensor, make_sparsity):
    """Computed rows include the mean of each skipped block, weighted by its number of keys; other rows stay."""
    sparsity = make_sparsity(**case)
    q, k, v = (make_tensor(case["batch"], case["tokens"], case["heads"], 32) for _ in range(3))
    lengths = torch.tensor([case["tokens"] - 37] * case["batch"], dtype=torch.int32, device=q.device)
    options = {"kv_len": lengths if has_lengths else None, "out": torch.full_like(q, torch.nan), "return_lse": True}
    out, lse = attention(q, k, v, sparsity.plan, tile_means=True, backend=backend, **options)
    expected, expected_lse = naive(q, k, v, sparsity, options["kv_len"])
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-4, rtol=1e-4)


def test_query_heads_share_the_means_of_their_keys(backend, make_tensor, make_sparsity):
    """Grouped queries, half precision and strided inputs."""
    sparsity = make_sparsity(batch=1, heads=4, tokens=200)
    q = make_tensor(1, 4, 200, 64, dtype=torch.float16).transpose(1, 2)
    k, v = (make_tensor(1, 200, 2, 64, dtype=torch.float16) for _ in range(2))
    out = attention(q, k, v, sparsity.plan, tile_means=True, out=torch.full_like(q, torch.nan), backend=backend)
    expected, _ = naive(q, k, v, sparsity, None)
    torch.testing.assert_close(out.float(), expected.float(), atol=5e-3, rtol=5e-3, equal_nan=True)
