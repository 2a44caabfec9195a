"""Symbols: the shapes and the type that their bits must have."""

import pytest
import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import lower
from dit_accel.symbols import SparseSymbols


def bits(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.full(shape, 255, dtype=dtype)


def symbols(**changes) -> SparseSymbols:
    """Two samples, three heads, nine ragged blocks of 64 tokens."""
    arguments = {
        "cache_bits": bits(2, 9, 1),
        "skip_bits": bits(2, 3, 9, 2),
        "heads": 3,
        "tokens": 8 * 64 + 1,
        "block": 64,
    }
    return SparseSymbols(**{**arguments, **changes})


def test_symbols_know_their_blocks_and_tensors():
    """Blocks count the ragged tail; the tensors are those that are held, in symbols and in their plan."""
    held = symbols()
    assert held.blocks == 9
    assert [tensor.data_ptr() for tensor in held.tensors()] == [held.cache_bits.data_ptr(), held.skip_bits.data_ptr()]
    assert len(symbols(skip_bits=None).tensors()) == 1
    plan = lower(held)
    assert (plan.batch, plan.heads, plan.blocks) == (2, 3, 9)
    assert len(plan.tensors()) == 7


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"cache_bits": bits(2, 9, 1, dtype=torch.int64)}, r"cache_bits must be uint8 \[2, 9, 1\], got torch.int64"),
        ({"cache_bits": bits(2, 8, 1)}, r"cache_bits must be uint8 \[2, 9, 1\], got torch.uint8 \[2, 8, 1\]"),
        ({"cache_bits": bits(2, 9, 2)}, "cache_bits must be"),
        ({"cache_bits": torch.tensor(255, dtype=torch.uint8)}, "cache_bits must be"),
        ({"skip_bits": bits(1, 3, 9, 2)}, r"skip_bits must be uint8 \[2, 3, 9, 2\]"),
        ({"skip_bits": bits(2, 3, 9, 1)}, "skip_bits must be"),
        ({"skip_bits": bits(2, 3, 9, 2, dtype=torch.bool)}, "skip_bits must be"),
        ({"heads": 9}, r"cache_bits must be uint8 \[2, 9, 2\]"),
        ({"heads": 0}, "heads must be between 1 and 64, got 0"),
        ({"heads": 65, "cache_bits": bits(2, 9, 9), "skip_bits": None}, "heads must be between 1 and 64, got 65"),
    ],
    ids=["dtype", "blocks", "bytes", "scalar", "batch", "skip-bytes", "skip-dtype", "heads", "no-heads", "65-heads"],
)
def test_wrong_bits_are_refused(changes, complaint):
    """An error names the argument, the shape that it must have and what came."""
    with pytest.raises(ShapeError, match=complaint):
        symbols(**changes)


def test_64_heads_fit():
    """All 64 heads of a row-block fit its word, whose sign bit is the last head."""
    plan = lower(SparseSymbols(bits(1, 2, 8), None, heads=64, tokens=128, block=64))
    assert plan.mask64.tolist() == [[-1, -1]]
