"""Single keys join the softmax of a row's tiles: the same rows, keys and weights as a dense mask, and nothing else."""

import math
from dataclasses import replace

import pytest
import torch

from dit_accel.kernels import attention, lower, pack_bits
from dit_accel.kernels.backends import hopper_limit
from dit_accel.kernels.symbols import SparseSymbols
from tests.kernels.conftest import BACKENDS, DEVICE, IMPLEMENTED, is_refused, needs_gpu
from tests.kernels.naive_attention import LAYOUTS, attending, check, dense, laid_out
from tests.pairs import every_pair

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy on the log of an empty sum
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or hopper_limit(torch.zeros(1, device="cuda")) is not None, reason="needs Hopper"
)
CASES = {
    "ragged": {"batch": 2, "heads": 2, "tokens": 130},
    "block-128": {"batch": 1, "heads": 2, "tokens": 260, "block": 128},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 192},
    "single-block": {"batch": 1, "heads": 5, "tokens": 40, "tiles": 0.0},
    "ten-heads": {"batch": 1, "heads": 10, "tokens": 70},
    "no-tiles": {"batch": 1, "heads": 2, "tokens": 200, "rows": 1.1, "tiles": 0.0},
    "all-tiles": {"batch": 1, "heads": 2, "tokens": 130, "rows": 1.1, "tiles": 1.1},
}


HOPPER_CASES = {
    "ragged": {"batch": 2, "heads": 5, "tokens": 1000, "keys": 0.3},
    "no-tiles": {"batch": 1, "heads": 3, "tokens": 900, "tiles": 0.0, "keys": 0.05},
    "few-keys": {"batch": 1, "heads": 40, "tokens": 700, "keys": 0.005},
    "every-key": {"batch": 1, "heads": 3, "tokens": 900, "tiles": 0.2, "keys": 1.1},
    "no-key": {"batch": 1, "heads": 3, "tokens": 900, "keys": 0.0},
    "more-rows-than-programs": {"batch": 2, "heads": 24, "tokens": 2500, "keys": 0.1},
}


@pytest.fixture
def make_slices(make_sparsity):
    """``make(..., keys=0.3)``: tiles of :func:`make_sparsity`, and that share of all other keys, row by row.

    The first row-block of each head has no single key, and where it has no tile either it is empty. Returns the
    sparsity with the new symbols and plan, and the pairs that attend, bool ``[B, H, S, S]``.
    """
    generator = torch.Generator().manual_seed(2)

    def make(keys: float = 0.3, **case):
        sparsity = make_sparsity(**case)
        plan = sparsity.plan
        block, tokens = plan.block, plan.tokens
        shape = (*sparsity.rows.shape, plan.blocks * block)
        is_key = torch.rand(shape, generator=generator).to(DEVICE) < keys
        tiles = (sparsity.tiles | ~sparsity.rows[..., None]).repeat_interleave(block, -1)
        is_key[:, :, 0] = False
        slice_bits = pack_bits(is_key & ~tiles)
        symbols = replace(sparsity.symbols, slice_bits=slice_bits)
        single = (is_key & ~tiles).repeat_interleave(block, 2)[:, :, :tokens, :tokens]
        return sparsity._replace(symbols=symbols, plan=lower(symbols)), attending(sparsity) | single

    return make


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_equals_dense_masked_attention(case, backend, dtype, make_slices, make_tensor, assert_no_worse):
    """Results are as exact as dense ones in the same precision; reused rows stay, empty ones are 0 with lse -inf."""
    sparsity, pairs = make_slices(**case)
    q, k, v = (make_tensor(case["batch"], case["tokens"], case["heads"], 16, dtype=dtype) for _ in range(3))
    check(q, k, v, sparsity, backend, assert_no_worse, pairs=pairs)


@every_pair(layout=LAYOUTS, head_dim=(32, 64, 128), backend=BACKENDS)
def test_layouts_and_head_dimensions(layout, head_dim, backend, make_slices, make_tensor, assert_no_worse):
    sparsity, pairs = make_slices(batch=2, heads=4, tokens=130)
    qkv = laid_out(layout, make_tensor, head_dim=head_dim)
    check(*qkv, sparsity, backend, assert_no_worse, pairs=pairs, scale=0.3)


def check_lengths(lengths, shape, sparsity, pairs, backend, make_tensor, assert_no_worse):
    """Keys beyond ``kv_len`` take no part, neither through the mask nor through NaN."""
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q, k, v = (make_tensor(*shape, dtype=torch.float16) for _ in range(3))
    clean = check(q, k, v, sparsity, backend, assert_no_worse, pairs=pairs, kv_len=kv_len)
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = math.nan
    poisoned = attention(q, k, v, sparsity.plan, kv_len=kv_len, backend=backend)
    computed = sparsity.tokens_computed()
    assert torch.equal(poisoned[computed], clean[computed])


@pytest.mark.parametrize("lengths", [(200, 1), (130, 0)], ids=str)
def test_keys_beyond_kv_len_take_no_part(lengths, backend, make_slices, make_tensor, assert_no_worse):
    check_lengths(
        lengths, (2, 200, 1, 16), *make_slices(batch=2, heads=1, tokens=200), backend, make_tensor, assert_no_worse
    )


def test_tiles_may_have_masks(backend, make_slices, make_tensor, assert_no_worse):
    sparsity, pairs = make_slices(batch=1, heads=2, tokens=200, masked=0.6)
    q, k, v = (make_tensor(1, 200, 2, 16, dtype=torch.float16) for _ in range(3))
    check(q, k, v, sparsity, backend, assert_no_worse, pairs=pairs)


def test_tiles_may_be_multiplied_in_8_bits(make_slices, make_tensor):
    sparsity, pairs = make_slices(batch=1, heads=2, tokens=200, rows=1.1)
    q, k, v = (make_tensor(1, 200, 2, 32) + shift for shift in (0, 1, 0))
    out = attention(q, k, v, sparsity.plan, qk_dtype="int8", backend="reference")
    exact, _ = dense(*(x.double() for x in (q, k, v)), pairs)
    assert (out - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("case", ["ragged", "ten-heads", "block-128"])
def test_lowering_counts_the_keys_of_rows_that_compute(case, backend, make_slices):
    """Bits beyond the last token are none; rows with a key are listed head by head, those with most keys first."""
    sparsity, _ = make_slices(**CASES[case])
    keys = sparsity.symbols.slice_bits.clone()
    keys[..., -1] |= 0x80  # the last bit of the padding, or the last token's
    slices = lower(replace(sparsity.symbols, slice_bits=keys), backend=backend).slices
    batch, heads, blocks = sparsity.rows.shape
    expected = torch.zeros(batch, heads, blocks, dtype=torch.int32)
    for b, h, i in sparsity.rows.nonzero().tolist():
        bits = "".join(f"{byte:08b}"[::-1] for byte in keys[b, h, i].tolist())
        expected[b, h, i] = bits[: sparsity.plan.tokens].count("1")
    assert torch.equal(slices.count.cpu(), expected)
    counts = expected.flatten().tolist()
    work = slices.work[: slices.work_count.item()].tolist()
    with_keys = [row for row, count in enumerate(counts) if count]
    assert work == sorted(with_keys, key=lambda row: (row // blocks, -counts[row], row))


@on_hopper
@every_pair(case=HOPPER_CASES, head_dim=(64, 128), dtype=(torch.float16, torch.bfloat16))
def test_hopper_equals_dense_masked_attention(case, head_dim, dtype, make_slices, make_tensor, assert_no_worse):
    sparsity, pairs = make_slices(**case, block=128)
    q, k, v = (make_tensor(case["batch"], case["tokens"], case["heads"], head_dim, dtype=dtype) for _ in range(3))
    check(q, k, v, sparsity, "cuda", assert_no_worse, pairs=pairs)


@on_hopper
def test_hopper_takes_lengths(make_slices, make_tensor, assert_no_worse):
    sparsity, pairs = make_slices(batch=3, heads=2, tokens=900, block=128)
    check_lengths((700, 0, 129), (3, 900, 2, 128), sparsity, pairs, "cuda", make_tensor, assert_no_worse)


@needs_gpu
def test_masks_take_an_eighth_of_the_papers_memory():
    """Memory of bits, lists and the kernel's own buffers, compared with FG-Attn's int32 lists of a 12-head layer."""
    heads, tokens, block = 12, 32760, 128
    blocks = -(-tokens // block)
    q = torch.randn(1, tokens, heads, 128, device=DEVICE, dtype=torch.bfloat16)
    out, before = torch.zeros_like(q), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cache_bits = torch.full((1, blocks, 2), 255, dtype=torch.uint8, device=DEVICE)
    skip_bits = torch.zeros(1, heads, blocks, blocks // 8, dtype=torch.uint8, device=DEVICE)
    slice_bits = torch.full((1, heads, blocks, blocks * block // 8), 255, dtype=torch.uint8, device=DEVICE)
    plan = lower(SparseSymbols(cache_bits, skip_bits, heads, tokens, block, slice_bits=slice_bits))
    attention(q, q, q, plan, out=out)
    assert torch.cuda.max_memory_allocated() - before <= heads * blocks * tokens * 4 / 8
