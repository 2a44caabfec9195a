"""The benchmark's check of gradients passes right ones and fails wrong ones, whichever of the three is wrong."""

import pytest
import torch

from dit_accel.kernels import attention, attention_backward
from scripts.bench.kernels.cases import Case, make_inputs
from scripts.bench.kernels.verify_attention import verify_attention_gradients

CASE = Case(300, heads=2, head_dim=32, block=64, batch=2, rows=0.8, tiles=0.4, dtype=torch.float16)


@pytest.fixture
def checked():
    """``check(wrong)``: the verdict where the gradient of that index is 10% too large; None = where all are right."""
    inputs = make_inputs(CASE, "cpu")
    qkv, do = inputs.qkv(), inputs.features()
    o, lse = attention(*qkv, inputs.plan, return_lse=True)
    right = attention_backward(*qkv, o, lse, do, inputs.plan)

    def check(wrong: int | None):
        gradients = [gradient * 1.1 if index == wrong else gradient for index, gradient in enumerate(right)]
        return verify_attention_gradients(gradients, qkv, do, inputs, samples=4)

    return check


def test_right_gradients_pass(checked):
    assert checked(None).passed


@pytest.mark.parametrize("wrong", range(3), ids=["dq", "dk", "dv"])
def test_a_wrong_gradient_fails(wrong, checked):
    assert not checked(wrong).passed
