"""The kept keys are those of a float64 softmax, query by query, except for keys right at the threshold."""

import math

import pytest
import torch

from dit_accel.kernels import select_keys, unpack_bits
from tests.kernels.conftest import DEVICE

CASES = {
    "row-blocks": {"group": 64, "block": 64, "queries": 200},
    "row-blocks-128": {"group": 128, "block": 128, "queries": 200},
    "single-queries": {"group": 1, "block": 128, "queries": 5},
    "many-single-queries": {"group": 1, "block": 64, "queries": 70},
}
ROUNDING = 1.02  # of half-precision scores, in a probability


def kept_and_dropped(q, k, threshold, group):
    """Keys that must stay and keys that must not, bool ``[B, H, rows, S]``; those within rounding are in neither."""
    batch, queries, heads, head_dim = q.shape
    tokens, rows = k.shape[1], -(-queries // group)
    stays = torch.zeros(batch, heads, rows, tokens, dtype=torch.bool)
    goes = torch.zeros_like(stays)
    for b in range(batch):
        for h in range(heads):
            scores = q[b, :, h].double() @ k[b, :, h].double().T / math.sqrt(head_dim)
            share = scores.softmax(-1).cpu() * tokens  # in units of 1 / N
            for row in range(rows):
                best = (share / share.amax(-1, keepdim=True))[row * group : (row + 1) * group]
                relative = share[row * group : (row + 1) * group] / threshold
                stays[b, h, row] = ((relative > ROUNDING) | (best == 1)).any(0)
                goes[b, h, row] = ((relative < 1 / ROUNDING) & (best < 0.99)).all(0)
    return stays, goes


@pytest.mark.parametrize("threshold", [0.5, 20.0])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_keys_stay_that_any_query_of_the_group_needs(case, threshold, backend, make_tensor):
    """At 20 / N some queries have no key above the threshold: they keep their best."""
    q = make_tensor(1, case["queries"], 2, 16, dtype=torch.float16) * 2
    k = make_tensor(1, 150, 2, 16, dtype=torch.float16)
    bits = select_keys(q, k, threshold, group=case["group"], block=case["block"], backend=backend)
    selected = unpack_bits(bits, -(-150 // case["block"]) * case["block"]).cpu()
    stays, goes = kept_and_dropped(q, k, threshold, case["group"])
    assert 0 < stays.sum() < stays.numel() or case["group"] > 1
    assert selected[..., :150][stays].all() and not selected[..., :150][goes].any() and not selected[..., 150:].any()


@pytest.mark.parametrize("group", [64, 1])
def test_keys_beyond_kv_len_are_not_there(group, backend, make_tensor):
    """They are never kept, have no weight whatever they contain, and N is the number of valid keys."""
    q, k = (make_tensor(3, 130, 1, 16, dtype=torch.float16) for _ in range(2))
    kv_len = torch.tensor([100, 0, 500], dtype=torch.int32, device=DEVICE)
    k[0, 100:], k[1] = math.nan, math.nan
    selected = unpack_bits(select_keys(q, k, 0.5, group=group, block=64, kv_len=kv_len, backend=backend), 192)
    alone = select_keys(q[:1], k[:1, :100].contiguous(), 0.5, group=group, block=64, backend=backend)
    assert torch.equal(selected[:1, ..., :128], unpack_bits(alone, 128))
    assert not selected[0, ..., 100:].any()
    assert not selected[1].any()
    everything = select_keys(q[2:], k[2:], 0.5, group=group, block=64, backend=backend)
    assert torch.equal(selected[2:], unpack_bits(everything, 192))


@pytest.mark.parametrize("threshold", [1.0, 100.0])
def test_even_attention_keeps_every_key(threshold, backend, make_tensor):
    """Equal keys below the threshold are all kept, so that the row is not empty."""
    q, k = torch.zeros(1, 70, 1, 16, device=DEVICE), make_tensor(1, 70, 1, 16)
    assert unpack_bits(select_keys(q, k, threshold, group=64, block=64, backend=backend), 128)[..., :70].all()


def test_views_of_a_fused_projection(backend, make_tensor):
    q, k, _ = make_tensor(1, 130, 3, 2, 16, dtype=torch.float16).unbind(2)
    expected = select_keys(q.contiguous(), k.contiguous(), 0.5, group=64, block=64, backend=backend)
    assert torch.equal(select_keys(q, k, 0.5, group=64, block=64, backend=backend), expected)
