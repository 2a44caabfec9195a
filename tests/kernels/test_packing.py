"""Masks survive packing, and the bit order is the one that the symbols document."""

import pytest
import torch

from dit_accel.kernels import pack_bits, unpack_bits

SHAPES = [(1,), (7,), (8,), (9,), (3, 64), (2, 5, 65), (4, 0, 9), (3, 300)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_equals_a_naive_loop_and_unpacking_undoes_it(shape, backend, device):
    mask = torch.rand(shape).to(device) < 0.5
    bits = pack_bits(mask, backend=backend)
    assert bits.shape == (*shape[:-1], -(-shape[-1] // 8))
    rows = mask.reshape(-1, shape[-1]).tolist()
    expected = [
        sum(bit << i for i, bit in enumerate(row[start : start + 8])) for row in rows for start in range(0, len(row), 8)
    ]
    assert bits.flatten().tolist() == expected
    assert torch.equal(unpack_bits(bits, shape[-1], backend=backend), mask)


def test_strided_masks_pack_like_their_copies(backend, device):
    mask = (torch.rand(12, 5).to(device) < 0.5).T
    assert torch.equal(pack_bits(mask, backend=backend), pack_bits(mask.contiguous(), backend="reference"))


@pytest.mark.parametrize(("most_first", "least_first"), [(224, 7), (235, 215), (197, 163)], ids=str)
def test_bit_order_against_the_worked_example(most_first, least_first, backend, device):
    """FlashOmni, section 3.3, prints 224, 235 and 197 most significant bit first; ours is the other order."""
    mask = torch.tensor([most_first >> (7 - i) & 1 for i in range(8)], dtype=torch.bool, device=device)
    byte = pack_bits(mask, backend=backend).item()
    assert byte == least_first
    assert [byte >> i & 1 for i in range(8)] == mask.int().tolist()  # section 3.4's decode formula


def test_bits_beyond_the_end_are_zero(backend, device):
    assert pack_bits(torch.ones(11, dtype=torch.bool, device=device), backend=backend).tolist() == [255, 7]
