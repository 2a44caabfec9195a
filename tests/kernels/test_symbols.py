"""Symbols: the shapes and the type that their bits must have."""

from dataclasses import replace

import pytest
import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import lower
from dit_accel.kernels.symbols import SparseSymbols, TileMasks


def bits(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.full(shape, 255, dtype=dtype)


def symbols(**changes) -> SparseSymbols:
    """Two samples, three heads, nine ragged blocks of 64 tokens."""
    arguments = {"cache_bits": bits(2, 9, 1), "skip_bits": bits(2, 3, 9, 2), "heads": 3, "tokens": 513, "block": 64}
    return SparseSymbols(**{**arguments, **changes})


def masks(codes=(1, 3, 9, 9), pool=(5, 64, 8), codes_dtype=torch.int32, pool_dtype=torch.uint8) -> TileMasks:
    """Masks that fit :func:`symbols`, with one code tensor for all samples."""
    return TileMasks(torch.zeros(codes, dtype=codes_dtype), torch.zeros(pool, dtype=pool_dtype))


def test_symbols_know_their_blocks_and_tensors():
    """Blocks include the ragged tail; the tensors are those in the symbols and in their plan."""
    some = symbols()
    assert some.blocks == 9
    assert [tensor.data_ptr() for tensor in some.tensors()] == [some.cache_bits.data_ptr(), some.skip_bits.data_ptr()]
    assert len(symbols(skip_bits=None).tensors()) == 1
    plan = lower(some)
    assert (plan.batch, plan.heads, plan.blocks) == (2, 3, 9) and len(plan.tensors()) == 5


@pytest.mark.parametrize("codes", [(2, 3, 9, 9), (1, 3, 9, 9), (2, 1, 9, 9), (1, 1, 9, 9)], ids=str)
def test_a_plan_holds_the_symbols_masks_and_marginal_tiles(codes):
    """Masks may be shared by samples and heads."""
    marked = symbols(masks=masks(codes), linear_bits=bits(2, 3, 9, 2))
    for holder in (marked, lower(marked)):
        assert holder.linear_bits is marked.linear_bits and holder.masks is marked.masks
        assert {id(marked.linear_bits), id(marked.masks.codes), id(marked.masks.pool)} <= set(map(id, holder.tensors()))


COUNT = torch.zeros(2, 3, 9, dtype=torch.int32)
WRONG_SYMBOLS = [
    ({"cache_bits": bits(2, 9, 1, dtype=torch.int64)}, r"cache_bits must be uint8 \[2, 9, 1\], got torch.int64"),
    ({"cache_bits": bits(2, 8, 1)}, r"cache_bits must be uint8 \[2, 9, 1\], got torch.uint8 \[2, 8, 1\]"),
    ({"cache_bits": torch.tensor(255, dtype=torch.uint8)}, "cache_bits must be"),
    ({"skip_bits": bits(1, 3, 9, 2)}, r"skip_bits must be uint8 \[2, 3, 9, 2\]"),
    ({"skip_bits": bits(2, 3, 9, 2, dtype=torch.bool)}, "skip_bits must be"),
    ({"heads": 9}, r"cache_bits must be uint8 \[2, 9, 2\]"),
    ({"heads": 0}, "heads must be between 1 and 64, got 0"),
    ({"heads": 65, "cache_bits": bits(2, 9, 9), "skip_bits": None}, "heads must be between 1 and 64, got 65"),
    ({"linear_bits": bits(2, 3, 9, 1)}, r"linear_bits must be uint8 \[2, 3, 9, 2\]"),
    ({"slice_bits": bits(2, 3, 9, 65)}, r"slice_bits must be uint8 \[2, 3, 9, 72\]"),
    ({"slice_bits": bits(2, 3, 9, 72), "skip_bits": None}, "slice_bits must be None if skip_bits is None"),
]
WRONG_MASKS = [
    ({"codes_dtype": torch.int64}, r"codes must be int32 \[B or 1, H or 1, Tq, Tk\], got torch.int64"),
    ({"codes": (3, 9, 9)}, r"codes must be int32 .*, got torch.int32 \[3, 9, 9\]"),
    ({"pool": (5, 64, 64), "pool_dtype": torch.bool}, r"pool must be uint8 .*, got torch.bool \[5, 64, 64\]; pack"),
    ({"pool": (64, 8)}, r"pool must be uint8 \[P, block, block / 8\], got torch.uint8 \[64, 8\]"),
    ({"pool": (5, 64, 16)}, "pool must be uint8"),
    ({"pool": (5, 128, 16)}, "pool must hold tiles of 64 tokens, got 128"),
    ({"codes": (3, 3, 9, 9)}, r"codes must have shape \[2 or 1, 3 or 1, 9, 9\], got \[3, 3, 9, 9\]"),
    ({"codes": (2, 3, 9, 8)}, "codes must have shape"),
]
WRONG_PLANS = [
    ({"masks": masks()}, "full_count and masks must both be given"),
    ({"full_count": COUNT}, "full_count and masks must both be given"),
    ({"full_count": COUNT.float(), "masks": masks()}, r"full_count must be int32 \[2, 3, 9\], got torch.float32"),
    ({"full_count": COUNT[..., 1:], "masks": masks()}, r"full_count must be int32 .*, got torch.int32 \[2, 3, 8\]"),
    ({"full_count": COUNT, "masks": masks((1, 1, 8, 8))}, r"codes must have shape \[2 or 1, 3 or 1, 9, 9\]"),
    ({"linear_bits": bits(2, 3, 9, 1)}, r"linear_bits must be uint8 \[2, 3, 9, 2\]"),
]


def test_wrong_parts_are_refused():
    """The error names the argument, the required shape and the one that came."""
    plan = lower(symbols())
    makers = (symbols, lambda **changes: symbols(masks=masks(**changes)), lambda **changes: replace(plan, **changes))
    for make, cases in zip(makers, (WRONG_SYMBOLS, WRONG_MASKS, WRONG_PLANS), strict=True):
        for changes, message in cases:
            with pytest.raises(ShapeError, match=message):
                make(**changes)
