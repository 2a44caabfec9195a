"""Single keys are counted and listed in a plan, take little memory, and join tiles that are multiplied in 8 bits."""

from dataclasses import replace

import pytest
import torch

from dit_accel.kernels import attention, lower
from dit_accel.kernels.symbols import SparseSymbols
from tests.kernels.conftest import DEVICE, needs_gpu
from tests.kernels.naive_attention import attending, dense


def test_tiles_may_be_multiplied_in_8_bits(make_sparsity, make_tensor):
    sparsity = make_sparsity(1, 2, 200, rows=1.1, keys=0.3)
    q, k, v = (make_tensor(1, 200, 2, 32) + shift for shift in (0, 1, 0))
    out = attention(q, k, v, sparsity.plan, qk_dtype="int8", backend="reference")
    exact, _ = dense(*(x.double() for x in (q, k, v)), attending(sparsity))
    assert (out - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("shape", [(2, 2, 130, 64), (1, 10, 70, 64), (1, 2, 260, 128)], ids=str)
def test_lowering_counts_the_keys_of_rows_that_compute(shape, backend, make_sparsity):
    """Bits beyond the last token are none; rows with a key are listed head by head, those with most keys first."""
    sparsity = make_sparsity(*shape, keys=0.3)
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
