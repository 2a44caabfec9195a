"""Exponentials of rows and their sums: a program reads a row three times, twice from the cache, and writes it once."""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch
from dit_accel.kernels.constants import LOG2_E

PART = 4096  # of a row at a time


@triton.jit
def _exponentials(scores, out, sums, columns, scale, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    place = tl.arange(0, PART)
    top = tl.full([PART], float("-inf"), tl.float32)
    for start in range(0, columns, PART):
        inside = start + place < columns
        top = tl.maximum(top, tl.load(scores + row + start + place, inside, other=float("-inf")))
    top = tl.max(top, 0)
    total = tl.zeros([PART], tl.float32)
    for start in range(0, columns, PART):
        inside = start + place < columns
        score = tl.load(scores + row + start + place, inside, other=float("-inf"))
        total += tl.exp2((score - top) * scale)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
    for start in range(0, columns, PART):
        inside = start + place < columns
        score = tl.load(scores + row + start + place, inside, other=0.0)
        weight = tl.exp2((score - top) * scale)
        tl.store(out + row + start + place, weight.to(out.dtype.element_ty), inside)


def exponentials_into(scores: torch.Tensor, scale: float, out: torch.Tensor, sums: torch.Tensor) -> None:
    """Fill ``out`` ``[R, K]`` with ``exp(scale * (scores - their maximum))``, and ``sums`` ``[R]`` with their sums.

    Divided by its sum, a small weight of many would lose digits in float16. Tensors are contiguous, sums float32.
    """
    rows, columns = scores.shape
    launch(_exponentials, rows, (scores, out, sums), (columns, scale * LOG2_E), PART=PART, num_warps=8)
