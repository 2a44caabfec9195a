"""Attention with one wide head equals its formula in float64."""

import sys

import torch

from dit_accel.kernels import single_head_attention
from tests.kernels.conftest import IMPLEMENTED, is_refused
from tests.pairs import every_pair

SHAPES = {  # samples, queries, keys, features
    "wide": (1, 70, 70, 320),
    "batch": (2, 33, 50, 264),
    "one": (1, 1, 1, 512),
    "narrow": (2, 40, 40, 64),
    "long": (1, 3, 9000, 272),
}


def exact(query, key, value):
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value.double()


def make_qkv(shape, dtype, make_tensor):
    batch, queries, keys, features = shape
    return [make_tensor(batch, tokens, features, dtype=dtype) for tokens in (queries, keys, keys)]


def assert_close(out, expected):
    bound = 2 * torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 1e-5
    assert out.shape == expected.shape and out.is_contiguous()
    assert (out.double() - expected).norm() <= bound * expected.norm()


@every_pair(is_refused, shape=SHAPES, factor=(1, 30), **IMPLEMENTED)
def test_attends(shape, factor, backend, dtype, make_tensor):
    """Of large scores some weights are 0 and 1."""
    query, key, value = make_qkv(shape, dtype, make_tensor)
    out = single_head_attention(factor * query, key, value, backend=backend)
    assert_close(out, exact(factor * query, key, value))


def test_many_equal_weights_keep_their_sum(make_tensor):
    """Each is too small for the digits of float16."""
    query = make_tensor(1, 1, 264, dtype=torch.float16)
    key, value = (torch.zeros(1, 70_000, 264, dtype=torch.float16, device=query.device) for _ in range(2))
    out = single_head_attention(query, key, value + 1, backend="triton")
    assert (out - 1).abs().max() < 1e-3


def test_some_queries_at_a_time(make_tensor, monkeypatch):
    """The last ones are fewer; strided tensors."""
    monkeypatch.setattr(sys.modules[single_head_attention.__module__], "SCORES", 70 * 32)
    query, key, value = make_qkv((2, 70, 70, 3 * 320), torch.float16, make_tensor)[0].chunk(3, -1)
    assert_close(single_head_attention(query, key, value, backend="triton"), exact(query, key, value))
