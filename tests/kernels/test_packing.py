"""Masks survive packing, and the bit order is the one that the symbols document."""

import pytest
import torch

from dit_accel.kernels import pack_bits, unpack_bits

SHAPES = [(1,), (7,), (8,), (9,), (3, 64), (2, 5, 65), (4, 0, 9), (3, 300), (9, 300)]  # a program packs 256 bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_equals_a_naive_loop_and_unpacking_undoes_it(shape, backend, device):
    """For masks with any strides; bits beyond the end are 0."""
    mask = (torch.rand(shape[::-1]).to(device) < 0.5).permute(*reversed(range(len(shape))))
    bits = pack_bits(mask, backend=backend)
    assert bits.shape == (*shape[:-1], -(-shape[-1] // 8))
    rows = mask.reshape(-1, shape[-1]).tolist()
    bytes_of_rows = [row[start : start + 8] for row in rows for start in range(0, len(row), 8)]
    assert bits.flatten().tolist() == [sum(bit << i for i, bit in enumerate(byte)) for byte in bytes_of_rows]
    assert torch.equal(unpack_bits(bits, shape[-1], backend=backend), mask)


def test_bit_order_against_the_worked_example():
    """FlashOmni, section 3.3, prints 224, 235 and 197 most significant bit first; ours is the other order."""
    for most_first, least_first in ((224, 7), (235, 215), (197, 163)):
        mask = torch.tensor([most_first >> (7 - i) & 1 for i in range(8)], dtype=torch.bool)
        assert pack_bits(mask).item() == least_first
        assert [least_first >> i & 1 for i in range(8)] == mask.int().tolist()  # section 3.4's decode formula
