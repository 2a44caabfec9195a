"""Gate, residual, norm and modulation in one pass equal the same formulas in float64, rounded once."""

import math

import pytest
import torch

from dit_accel.kernels import add_gated, add_gated_norm_modulate, norm_modulate
from tests.kernels.conftest import IMPLEMENTED, assert_rounded_once, is_refused
from tests.pairs import every_pair

MODULATIONS = {
    "shared": ((1, 1), torch.float32),  # as Wan's
    "per-sample-in-half": ((2, 1), torch.float16),  # as FLUX's
    "per-token": ((2, 7), torch.float32),
}
NORMS = {"layer": {"eps": 1e-6}, "rms": {"eps": 1e-5, "rms": True}}


def exact_norm(x, scale, shift, eps, rms=False):
    x = x.double() if rms else x.double() - x.double().mean(-1, keepdim=True)
    unit = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return unit * (1 + scale.double()) + (0.0 if shift is None else shift.double())


@every_pair(
    is_refused, width=(48, 128), rows=MODULATIONS, norm=NORMS, shifted=(True, False), gated=(True, False),
    update_eps=(None, 1e-4), **IMPLEMENTED,
)  # fmt: skip
def test_equals_the_formulas(width, rows, norm, shifted, gated, update_eps, backend, dtype, make_tensor):
    """One pass equals two: the norm reads the sum as written, rounded; the update may be normalised too."""
    x, update = make_tensor(2, 7, width, dtype=dtype) * 3 + 1, make_tensor(2, 7, width, dtype=dtype) * 4
    gate, scale, shift = (make_tensor(*rows[0], width, dtype=rows[1]) for _ in range(3))
    gate, shift = gate if gated else None, shift if shifted else None
    added = update.double()
    if update_eps is not None:
        added = added / (added.square().mean(-1, keepdim=True) + update_eps).sqrt()
    added = added if gate is None else gate.double() * added
    summed = add_gated(x, update, gate, update_eps=update_eps, backend=backend)
    normed = norm_modulate(summed, scale, shift, backend=backend, **norm)
    assert summed.dtype == normed.dtype == dtype
    assert_rounded_once(summed, x.double() + added, x.double().abs() + added.abs() + 10)
    exact = exact_norm(summed, scale, shift, **norm)
    assert_rounded_once(normed, exact, exact.abs() + 10)
    options = {"update_eps": update_eps, "backend": backend}
    both = add_gated_norm_modulate(x, update, gate, scale, shift, **norm, **options)
    assert torch.equal(both[0], summed)
    torch.testing.assert_close(both[1], normed)  # another compilation, with another order of sums


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


def test_a_float32_sum_has_a_norm_of_the_updates_dtype(backend, make_tensor):
    """As in MiniMax-H3's decoder; each is rounded once."""
    x, update, row = make_tensor(2, 7, 64), make_tensor(2, 7, 64, dtype=torch.float16), make_tensor(1, 1, 64)
    summed, normed = add_gated_norm_modulate(x, update, row, row, rms=True, backend=backend)
    assert (summed.dtype, normed.dtype) == (torch.float32, torch.float16)
    exacts = x.double() + row.double() * update.double(), exact_norm(summed, row, None, 1e-6, rms=True)
    for output, exact in zip((summed, normed), exacts, strict=True):
        assert_rounded_once(output, exact, exact.abs() + 10)


def test_inputs_in_any_layout(backend, make_tensor):
    """Slices along tokens have the joint sequence's batch stride; a patch embedding leaves tokens adjacent."""
    joint, gate = make_tensor(2, 9, 64), make_tensor(2, 1, 64)
    scale, shift = make_tensor(2, 1, 128).chunk(2, dim=-1)
    for x in (joint[:, 2:], make_tensor(2, 64, 7).transpose(1, 2)):
        actual = add_gated_norm_modulate(x, joint[:, :7], gate, scale, shift, backend=backend)
        expected = add_gated_norm_modulate(x.contiguous(), joint[:, :7].contiguous(), gate, scale, shift)
        torch.testing.assert_close(actual, expected)
