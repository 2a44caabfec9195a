"""The pooled map equals its definition in float64, for any content of padding and degenerate blocks."""

import math

import pytest
import torch

from dit_accel.kernels import pooled_map
from tests.kernels.conftest import IMPLEMENTED, is_refused
from tests.pairs import every_pair
from tests.sparse.policies.test_sparge import cosine

CASES = {
    "ragged": (2, 200, 3, 64),
    "single-block": (1, 40, 5, 64),
    "block-128": (1, 260, 2, 128),
    "whole-blocks": (1, 192, 2, 64),
    "more-blocks-than-a-step": (1, 64 * 64 + 5, 1, 64),
}


def naive_map(q, k, block, lengths):
    """Loops over blocks and tokens, in float64, by the definitions."""
    batch, tokens, heads, head_dim = q.shape
    q, k = q.double(), k.double()
    starts = range(0, tokens, block)

    probabilities = torch.zeros(batch, heads, len(starts), len(starts), dtype=torch.float64)
    q_similarity, k_similarity = torch.zeros(2, batch, heads, len(starts), dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            q_blocks = [q[b, s : s + block, h] for s in starts]
            k_blocks = [k[b, s : min(s + block, max(s, lengths[b])), h] for s in starts]
            q_similarity[b, h] = torch.tensor([cosine(x) for x in q_blocks])
            k_similarity[b, h] = torch.tensor([cosine(x) for x in k_blocks])
            kept = [j for j, x in enumerate(k_blocks) if len(x)]
            if kept:
                k_mean = torch.stack([k_blocks[j].mean(0) for j in kept]) - k[b, : lengths[b], h].mean(0)
                q_mean = torch.stack([x.mean(0) for x in q_blocks])
                probabilities[b, h][:, kept] = (q_mean @ k_mean.T / math.sqrt(head_dim)).softmax(-1).cpu()
    return probabilities, q_similarity, k_similarity


def check(q, k, block, lengths, backend):
    tokens = q.shape[1]
    kv_len = None if min(lengths) == tokens else torch.tensor(lengths, dtype=torch.int32, device=q.device)
    pooled = pooled_map(q, k, block, kv_len=kv_len, backend=backend)
    expected = naive_map(q, k, block, [min(n, tokens) for n in lengths])
    for actual, exact in zip((pooled.probabilities, pooled.q_similarity, pooled.k_similarity), expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double().cpu(), exact, rtol=1e-5, atol=1e-6)


@every_pair(is_refused, case=CASES, head_dim=(16, 64, 128), **IMPLEMENTED)
def test_equals_the_definition(case, head_dim, backend, dtype, make_tensor):
    """Inputs are rounded to their dtype; everything after that is float32, so one bound serves all dtypes."""
    batch, tokens, heads, block = case
    q, k = (make_tensor(batch, tokens, heads, head_dim, dtype=dtype) + 0.5 for _ in range(2))
    check(q, k, block, [tokens] * batch, backend)


def test_outliers_that_all_keys_share_do_not_blur_the_map(backend, make_tensor):
    """A channel at 1000 in every key shifts the scores of a row by a constant, which a softmax does not see."""
    q, k = make_tensor(1, 300, 2, 64), make_tensor(1, 300, 2, 64)
    k[..., 3] += 1000
    check(q, k, 64, [300], backend)


@pytest.mark.parametrize("lengths", [(130, 0), (500, 64)], ids=str)
def test_keys_beyond_kv_len_take_no_part(lengths, backend, make_tensor):
    """Nor does their NaN."""
    q, k = make_tensor(2, 200, 2, 32), make_tensor(2, 200, 2, 32)
    for b, length in enumerate(lengths):
        k[b, length:] = math.nan
    check(q, k, 64, lengths, backend)


def test_similarity_of_known_blocks(backend, device):
    """Equal directions give 1, opposite pairs 0. Zero tokens have no direction: only the others of a block count, and a
    block of zeros is represented by its mean."""
    q = torch.zeros(1, 320, 1, 32, device=device)
    q[0, :64, 0, 0] = torch.rand(64, device=device) + 0.5
    q[0, 64:128, 0, 0] = torch.tensor([1.0, -1.0], device=device).repeat(32)
    q[0, 192:224, 0, 3] = 2.0
    q[0, 256, 0, 1], q[0, 300, 0, 2] = 1.0, 3.0  # two directions at right angles
    pooled = pooled_map(q, q, 64, backend=backend)
    expected = torch.tensor([[[1.0, 0.0, 1.0, 1.0, 0.5]]], device=device)
    torch.testing.assert_close(pooled.q_similarity, expected)
    torch.testing.assert_close(pooled.k_similarity, expected)
    assert not pooled.probabilities.isnan().any()


def test_strided_views(backend, make_tensor):
    q, k, _ = make_tensor(2, 130, 3, 3, 32).unbind(2)
    check(q, k, 64, [130, 130], backend)
