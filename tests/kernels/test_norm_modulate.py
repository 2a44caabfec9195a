"""Gate, residual, LayerNorm and modulation in one pass equal the same formulas in float64, rounded once."""

import math

import pytest
import torch

from dit_accel.kernels import add_gated, add_gated_norm_modulate, norm_modulate
from tests.kernels.conftest import IMPLEMENTED, assert_rounded_once, is_refused
from tests.pairs import every_pair

MODULATIONS = {
    "shared": ((1, 1), torch.float32),
    "per-sample-in-half": ((2, 1), torch.float16),
    "per-token": ((2, 7), torch.float32),
}
WIDTH = 48  # not a power of two


def exact_norm(x, scale, shift, eps=1e-6):
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return unit * (1 + scale.double()) + shift.double()


@pytest.fixture
def modulations(rows, make_tensor):
    """``make(width, count)``: ``count`` modulations, in float32 as Wan's or in half precision as FLUX's."""
    shape, dtype = rows
    return lambda width, count: [make_tensor(*shape, width, dtype=dtype) for _ in range(count)]


@every_pair(is_refused, width=(WIDTH, 128), rows=MODULATIONS, **IMPLEMENTED)
def test_norm_and_modulation(width, modulations, backend, dtype, make_tensor):
    x, (scale, shift) = make_tensor(2, 7, width, dtype=dtype) * 3 + 1, modulations(width, 2)
    exact = exact_norm(x, scale, shift)
    assert_rounded_once(norm_modulate(x, scale, shift, backend=backend), exact, exact.abs() + 10)


@every_pair(is_refused, rows=MODULATIONS, **IMPLEMENTED)
def test_gated_sum(modulations, backend, dtype, make_tensor):
    x, update, (gate,) = (
        make_tensor(2, 7, WIDTH, dtype=dtype),
        make_tensor(2, 7, WIDTH, dtype=dtype),
        modulations(WIDTH, 1),
    )
    exact = x.double() + gate.double() * update.double()
    terms = x.double().abs() + (gate.double() * update.double()).abs()
    assert_rounded_once(add_gated(x, update, gate, backend=backend), exact, terms)


@every_pair(is_refused, **IMPLEMENTED)
def test_without_a_gate_the_update_is_added_whole(backend, dtype, make_tensor):
    x, update = make_tensor(2, 7, 48, dtype=dtype), make_tensor(2, 7, 48, dtype=dtype)
    assert torch.equal(add_gated(x, update, None, backend=backend), x + update)


@every_pair(is_refused, rows=MODULATIONS, **IMPLEMENTED)
def test_both_in_one_pass_equal_the_two_one_after_the_other(modulations, backend, dtype, make_tensor):
    """The norm reads the sum as it is written, rounded."""
    x, update = make_tensor(2, 7, WIDTH, dtype=dtype), make_tensor(2, 7, WIDTH, dtype=dtype)
    gate, scale, shift = modulations(WIDTH, 3)
    summed, normed = add_gated_norm_modulate(x, update, gate, scale, shift, eps=1e-5, backend=backend)
    assert torch.equal(summed, add_gated(x, update, gate, backend=backend))
    expected = norm_modulate(summed, scale, shift, eps=1e-5, backend=backend)
    torch.testing.assert_close(normed, expected)  # another compilation, with another order of sums


def rms(x, eps):
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()


@every_pair(is_refused, width=(WIDTH, 128), rows=MODULATIONS, **IMPLEMENTED)
def test_root_mean_square_leaves_the_mean(width, modulations, backend, dtype, make_tensor):
    """With and without a shift."""
    x, (scale, shift) = make_tensor(2, 7, width, dtype=dtype) * 3 + 1, modulations(width, 2)
    exact = rms(x, 1e-5) * (1 + scale.double())
    options = {"eps": 1e-5, "rms": True, "backend": backend}
    assert_rounded_once(norm_modulate(x, scale, **options), exact, exact.abs() + 10)
    exact = exact + shift.double()
    assert_rounded_once(norm_modulate(x, scale, shift, **options), exact, exact.abs() + 10)


@every_pair(is_refused, rows=MODULATIONS, **IMPLEMENTED)
def test_an_update_may_be_normalised(modulations, backend, dtype, make_tensor):
    """As in Z-Image: the update's norm, the sum, and the norm of the sum."""
    x, update = make_tensor(2, 7, WIDTH, dtype=dtype), make_tensor(2, 7, WIDTH, dtype=dtype) * 4
    gate, scale = modulations(WIDTH, 2)
    exact = x.double() + gate.double() * rms(update, 1e-4)
    summed = add_gated(x, update, gate, update_eps=1e-4, backend=backend)
    assert_rounded_once(summed, exact, x.double().abs() + exact.abs() + 10)
    options = {"eps": 1e-5, "rms": True, "backend": backend}
    both = add_gated_norm_modulate(x, update, gate, scale, update_eps=1e-4, **options)
    assert torch.equal(both[0], summed)
    torch.testing.assert_close(both[1], norm_modulate(summed, scale, **options))


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_may_take_their_modulations_from_a_table(batch, backend, make_tensor):
    """Rows of the table in any order, which is not read where no token asks for it."""
    x, update, rows = make_tensor(2, 7, 64), make_tensor(2, 7, 64), torch.tensor([3, 0, 0, 1, 3, 1, 0])
    table = make_tensor(batch, 4, 3 * 64)
    table[:, 2] = math.nan
    gate, scale, shift = table.chunk(3, dim=-1)
    of_tokens = [value[:, rows] for value in (gate, scale, shift)]
    options = {"backend": backend, "rows": rows.to(x.device)}
    expected = add_gated_norm_modulate(x, update, *of_tokens)
    torch.testing.assert_close(add_gated_norm_modulate(x, update, gate, scale, shift, **options), expected)
    torch.testing.assert_close(add_gated(x, update, gate, **options), expected[0])
    torch.testing.assert_close(norm_modulate(x, scale, **options), norm_modulate(x, of_tokens[1]))


def test_streams_of_a_joint_sequence_are_read_in_place(backend, make_tensor):
    """Slices along tokens have the joint sequence's batch stride."""
    joint, gate = make_tensor(2, 9, 64), make_tensor(2, 1, 64)
    scale, shift = make_tensor(2, 1, 128).chunk(2, dim=-1)
    actual = add_gated_norm_modulate(joint[:, 2:], joint[:, :7], gate, scale, shift, backend=backend)
    expected = add_gated_norm_modulate(joint[:, 2:].contiguous(), joint[:, :7].contiguous(), gate, scale, shift)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_tokens_may_lie_side_by_side(backend, make_tensor):
    """Tokens may be adjacent in memory, as a patch embedding leaves them."""
    x, row = make_tensor(2, 64, 7).transpose(1, 2), make_tensor(1, 1, 64)
    torch.testing.assert_close(norm_modulate(x, row, row, backend=backend), norm_modulate(x.contiguous(), row, row))
