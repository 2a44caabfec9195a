"""Weighted sum of remembered features, in one pass over all elements."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device

ELEMENTS = 1024  # elements per program
WARPS = 4


@triton.jit
def _weighted_sum(history, weights, out, elements, ENTRIES: tl.constexpr, ELEMENTS: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    valid = element < elements
    total = tl.zeros([ELEMENTS], tl.float32)
    for entry in tl.static_range(ENTRIES):
        total += weights[entry] * tl.load(history[entry] + element, valid, other=0.0).to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), valid)


def weighted_sum_into(history: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> None:
    """Fill a contiguous ``out``."""
    history = tuple(features.contiguous() for features in history)
    with on_device(out):
        _weighted_sum[(max(triton.cdiv(out.numel(), ELEMENTS), 1),)](
            history, tuple(map(float, weights)), out, out.numel(),
            ENTRIES=len(history), ELEMENTS=ELEMENTS, num_warps=WARPS,
        )  # fmt: skip
