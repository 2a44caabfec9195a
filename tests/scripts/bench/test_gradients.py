"""The benchmark's check of gradients."""

import pytest
import torch

from dit_accel.kernels import attention, attention_backward
from scripts.bench.kernels.cases import Case, make_inputs
from scripts.bench.kernels.verify_attention import verify_attention_gradients

CASE = Case(300, heads=2, head_dim=32, block=64, batch=2, rows=0.8, tiles=0.4, dtype=torch.float16)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2], ids=["right", "dq", "dk", "dv"])
def test_a_wrong_gradient_fails(wrong):
    """Right gradients pass, and one that is 10% too large does not."""
    inputs = make_inputs(CASE, "cpu")
    qkv, do = inputs.qkv(), inputs.features()
    o, lse = attention(*qkv, inputs.plan, return_lse=True)
    right = attention_backward(*qkv, o, lse, do, inputs.plan)
    gradients = [gradient * 1.1 if index == wrong else gradient for index, gradient in enumerate(right)]
    assert verify_attention_gradients(gradients, qkv, do, inputs, samples=4).passed == (wrong is None)
