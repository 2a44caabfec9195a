"""Makers of random tensors and symbols, and the bound that every kernel is held to."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dit_accel.kernels import lower, pack_bits
from dit_accel.kernels.backends import hopper_limit
from dit_accel.kernels.symbols import FIRST_PARTIAL_TILE, AttentionPlan, SparseSymbols, TileMasks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
needs_hopper = pytest.mark.skipif(
    DEVICE == "cpu" or hopper_limit(torch.zeros(1, device=DEVICE)) is not None, reason="needs Hopper"
)
BACKENDS = ("reference", "triton")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
IMPLEMENTED = {"backend": BACKENDS, "dtype": DTYPES}  # axes of `every_pair`


def is_refused(case: dict) -> bool:
    """Return True for Triton's bfloat16 on a CPU: the interpreter computes it wrongly, and the ops refuse it there."""
    return (case["backend"], case["dtype"], DEVICE) == ("triton", torch.bfloat16, "cpu")


def assert_rounded_once(
    actual: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor | float, layout: torch.memory_format | None = None
) -> None:
    """Allow half a unit of the result's dtype, and float32 rounding of its ``terms``."""
    assert actual.shape == exact.shape and (layout is None or actual.is_contiguous(memory_format=layout))
    allowed = 0.505 * torch.finfo(actual.dtype).eps * exact.abs() + 32 * torch.finfo(torch.float32).eps * terms
    assert ((actual.double() - exact).abs() <= allowed).all()


def assert_no_worse(actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor) -> None:
    """Check that a result is about as close to the float64 ``exact`` as the dense low-precision ``low``.

    The factor 2 and float32's 16 units stand for another order of summation: a sum of 1024 terms rounds 1024 times, and
    32 times as much as once if the roundings are independent. TF32, which must not be used, would miss by 500 units.
    """
    assert actual.dtype == low.dtype and actual.shape == exact.shape == low.shape
    if not exact.numel():
        return
    error, low_error = ((x.double() - exact).abs().max().item() for x in (actual, low))
    units = 16 if actual.dtype == torch.float32 else 1  # half precision rounds once, float32 at every addition
    rounding = units * torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert error <= 2 * low_error + rounding, f"error {error:.3g}, dense {low_error:.3g}, rounding {rounding:.3g}"


def captured(function: Callable) -> object:
    """Return what a function makes in a replayed CUDA graph, whose capture fails if the host waits for the GPU."""
    function()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    graph.replay()
    torch.cuda.synchronize()
    return result


class Sparsity(NamedTuple):
    """Random symbols, the masks they were packed from and the plan they lower to."""

    rows: torch.Tensor  # bool [B, H, T]
    tiles: torch.Tensor  # bool [B, H, T, T]; False in reused rows
    symbols: SparseSymbols
    plan: AttentionPlan

    def tokens_computed(self) -> torch.Tensor:
        """bool ``[B, S, H]``."""
        return self.rows.repeat_interleave(self.plan.block, 2)[:, :, : self.plan.tokens].transpose(1, 2)


@pytest.fixture(autouse=True)
def numpy_is_silent():
    """Triton's interpreter computes in numpy, which warns of the log of an empty sum, and of a sample without a key."""
    with np.errstate(divide="ignore", invalid="ignore"):
        yield


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture
def make_tensor():
    """``make(*shape, dtype=...)``: normal random numbers, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    return make


@pytest.fixture
def make_sparsity():
    """``make(batch, heads, tokens, block=64, rows=0.6, tiles=0.5, ...)``: symbols of those densities, lowered.

    ``masked``: the share of tiles with a random mask, CAUSAL or one of three PARTIAL ones; None = no masks at all.
    ``keys``: the share of single keys among those in no tile of a row; None = none. The first row-block has no single
    key; where it has no tile either, it is empty.
    """
    generator = torch.Generator().manual_seed(1)

    def make_masks(batch: int, heads: int, blocks: int, block: int, masked: float) -> TileMasks:
        shape = (batch, heads, blocks, blocks)
        codes = torch.randint(1, FIRST_PARTIAL_TILE + 3, shape, generator=generator, dtype=torch.int32)
        codes[torch.rand(shape, generator=generator) >= masked] = 0
        pool = torch.rand(3, block, block, generator=generator) < 0.5
        return TileMasks(codes.to(DEVICE), pack_bits(pool, backend="reference").to(DEVICE))

    def make(
        batch: int,
        heads: int,
        tokens: int,
        block: int = 64,
        rows: float = 0.6,
        tiles: float = 0.5,
        masked: float | None = None,
        keys: float | None = None,
    ) -> Sparsity:
        blocks = -(-tokens // block)
        row_mask = (torch.rand(batch, heads, blocks, generator=generator) < rows).to(DEVICE)
        tile_mask = (torch.rand(batch, heads, blocks, blocks, generator=generator) < tiles).to(DEVICE)
        cache_bits, skip_bits = pack_bits(row_mask.transpose(1, 2)), pack_bits(tile_mask)
        masks = None if masked is None else make_masks(batch, heads, blocks, block, masked)
        symbols = SparseSymbols(cache_bits, skip_bits, heads, tokens, block, masks)
        if keys is not None:
            is_key = (torch.rand(*tile_mask.shape[:3], blocks * block, generator=generator) < keys).to(DEVICE)
            is_key[:, :, 0] = False
            in_tile = (tile_mask | ~row_mask[..., None]).repeat_interleave(block, -1)
            symbols = replace(symbols, slice_bits=pack_bits(is_key & ~in_tile))
        return Sparsity(row_mask, tile_mask & row_mask[..., None], symbols, lower(symbols, backend="reference"))

    return make
