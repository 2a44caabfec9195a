"""Softmax of rows: a program reads a row three times, twice of it from the cache, and writes it once."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, on_device

PART = 4096  # of a row at a time


@triton.jit
def _softmax(scores, out, columns, scale, PART: tl.constexpr):
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
    factor = 1.0 / tl.sum(total, 0)
    for start in range(0, columns, PART):
        inside = start + place < columns
        score = tl.load(scores + row + start + place, inside, other=0.0)
        weight = tl.exp2((score - top) * scale) * factor
        tl.store(out + row + start + place, weight.to(out.dtype.element_ty), inside)


def softmax_into(scores: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Fill ``out`` ``[R, K]`` with the softmax of ``scale * scores``, float32 ``[R, K]``, over K; both contiguous."""
    rows, columns = scores.shape
    with on_device(scores):
        launch(_softmax, rows, (scores, out), (columns, scale * math.log2(math.e)), PART=PART, num_warps=8)
