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
    arguments = {
        "cache_bits": bits(2, 9, 1),
        "skip_bits": bits(2, 3, 9, 2),
        "heads": 3,
        "tokens": 8 * 64 + 1,
        "block": 64,
    }
    return SparseSymbols(**{**arguments, **changes})


def masks(codes=(1, 3, 9, 9), pool=(5, 64, 8), codes_dtype=torch.int32, pool_dtype=torch.uint8) -> TileMasks:
    """Masks that fit :func:`symbols`, with one code tensor for all samples."""
    return TileMasks(torch.zeros(codes, dtype=codes_dtype), torch.zeros(pool, dtype=pool_dtype))


def test_symbols_know_their_blocks_and_tensors():
    """Blocks include the ragged tail; the tensors are those in the symbols and in their plan."""
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
    """The error names the argument, the required shape and the given one."""
    with pytest.raises(ShapeError, match=complaint):
        symbols(**changes)


def test_64_heads_fit():
    """All 64 heads of a row-block fit its word, whose sign bit is the last head."""
    plan = lower(SparseSymbols(bits(1, 2, 8), None, heads=64, tokens=128, block=64))
    assert plan.mask64.tolist() == [[-1, -1]]


@pytest.mark.parametrize("codes", [(2, 3, 9, 9), (1, 3, 9, 9), (2, 1, 9, 9), (1, 1, 9, 9)], ids=str)
def test_masks_may_be_shared_by_samples_and_heads(codes):
    held = symbols(masks=masks(codes))
    assert [tensor.data_ptr() for tensor in held.tensors()[2:]] == [
        held.masks.codes.data_ptr(),
        held.masks.pool.data_ptr(),
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"codes_dtype": torch.int64}, r"codes must be int32 \[B or 1, H or 1, Tq, Tk\], got torch.int64"),
        ({"codes": (3, 9, 9)}, r"codes must be int32 .*, got torch.int32 \[3, 9, 9\]"),
        ({"pool": (5, 64, 64), "pool_dtype": torch.bool}, r"pool must be uint8 .*, got torch.bool \[5, 64, 64\]; pack"),
        ({"pool": (64, 8)}, r"pool must be uint8 \[P, block, block / 8\], got torch.uint8 \[64, 8\]"),
        ({"pool": (5, 64, 16)}, "pool must be uint8"),
        ({"pool": (5, 128, 16)}, "pool must hold tiles of 64 tokens, got 128"),
        ({"codes": (3, 3, 9, 9)}, r"codes must have shape \[2 or 1, 3 or 1, 9, 9\], got \[3, 3, 9, 9\]"),
        ({"codes": (2, 2, 9, 9)}, "codes must have shape"),
        ({"codes": (2, 3, 9, 8)}, "codes must have shape"),
    ],
    ids=["codes-dtype", "codes-axes", "unpacked", "pool-axes", "pool-not-square", "block", "batch", "heads", "blocks"],
)
def test_wrong_masks_are_refused(changes, complaint):
    with pytest.raises(ShapeError, match=complaint):
        symbols(masks=masks(**changes))


def test_a_plan_holds_its_masks_and_the_count_of_full_tiles():
    plan = lower(symbols())
    masked = replace(plan, full_count=torch.zeros_like(plan.kv_count), masks=masks())
    assert len(masked.tensors()) == len(plan.tensors()) + 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"masks": masks()}, "full_count and masks must both be given"),
        ({"full_count": torch.zeros(2, 3, 9, dtype=torch.int32)}, "full_count and masks must both be given"),
        (
            {"full_count": torch.zeros(2, 3, 9), "masks": masks()},
            r"full_count must be int32 \[2, 3, 9\], got torch.float32",
        ),
        (
            {"full_count": torch.zeros(2, 3, 8, dtype=torch.int32), "masks": masks()},
            r"full_count must be int32 \[2, 3, 9\], got torch.int32 \[2, 3, 8\]",
        ),
        (
            {"full_count": torch.zeros(2, 3, 9, dtype=torch.int32), "masks": masks((1, 1, 8, 8))},
            r"codes must have shape \[2 or 1, 3 or 1, 9, 9\]",
        ),
    ],
    ids=["masks-alone", "count-alone", "count-dtype", "count-shape", "codes-shape"],
)
def test_a_plan_with_wrong_masks_is_refused(changes, complaint):
    with pytest.raises(ShapeError, match=complaint):
        replace(lower(symbols()), **changes)


def test_marginal_tiles_go_from_symbols_to_their_plan():
    """Lowering copies their bits into a new plan, and into scratch with or without such bits."""
    held = symbols(linear_bits=bits(2, 3, 9, 2))
    assert held.tensors()[-1] is held.linear_bits
    plan = lower(held)
    assert plan.linear_bits is held.linear_bits
    assert lower(symbols(), scratch=plan).linear_bits is None
    assert lower(held, scratch=lower(symbols())).linear_bits is held.linear_bits


@pytest.mark.parametrize(
    "wrong", [bits(2, 3, 9, 1), bits(1, 3, 9, 2), bits(2, 3, 9, 2, dtype=torch.bool)], ids=["bytes", "batch", "dtype"]
)
def test_wrong_marginal_tiles_are_refused(wrong):
    with pytest.raises(ShapeError, match=r"linear_bits must be uint8 \[2, 3, 9, 2\]"):
        symbols(linear_bits=wrong)
    with pytest.raises(ShapeError, match=r"linear_bits must be uint8 \[2, 3, 9, 2\]"):
        replace(lower(symbols()), linear_bits=wrong)
