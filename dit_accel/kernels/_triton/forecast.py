"""Weighted sum of remembered features: elementwise over everything, or over the rows that a plan reuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device
from dit_accel.symbols import AttentionPlan

ELEMENTS = 4096


@triton.jit
def _sum_everything(history, weights, out, elements, ENTRIES: tl.constexpr, ELEMENTS: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    valid = element < elements
    total = tl.zeros([ELEMENTS], tl.float32)
    for entry in tl.static_range(ENTRIES):
        total += weights[entry] * tl.load(history[entry] + element, valid, other=0.0).to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), valid)


@triton.jit
def _sum_reused_rows(
    history, weights, out, mask64, out_batch, out_token, out_head, heads, blocks, tokens, head_dim,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # (b * Tq + i) * H + h
    head = program % heads
    if (tl.load(mask64 + program // heads) >> head & 1) == 1:
        return
    batch = program // heads // blocks
    token = (program // heads % blocks * BLOCK + tl.arange(0, BLOCK))[:, None]
    dim = tl.arange(0, DIM_TILE)[None, :]
    valid = (token < tokens) & (dim < head_dim)
    cell = ((batch * tokens + token) * heads + head) * head_dim + dim  # in a contiguous [B, S, H, D]
    total = tl.zeros([BLOCK, DIM_TILE], tl.float32)
    for entry in tl.static_range(ENTRIES):
        total += weights[entry] * tl.load(history[entry] + cell, valid, other=0.0).to(tl.float32)
    pointers = out + batch * out_batch + token * out_token + head * out_head + dim
    tl.store(pointers, total.to(out.dtype.element_ty), valid)


def weighted_sum_into(
    history: Sequence[torch.Tensor], weights: Sequence[float], plan: AttentionPlan | None, out: torch.Tensor
) -> None:
    history = tuple(features.contiguous() for features in history)
    weights = tuple(map(float, weights))
    with on_device(out):
        if plan is None:
            target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
            grid = (triton.cdiv(target.numel(), ELEMENTS),)
            _sum_everything[grid](history, weights, target, target.numel(), ENTRIES=len(history), ELEMENTS=ELEMENTS)
            if target is not out:
                out.copy_(target)
            return
        batch, tokens, heads, head_dim = out.shape
        _sum_reused_rows[(batch * plan.blocks * heads,)](
            history, weights, out, plan.mask64, *out.stride()[:3], heads, plan.blocks, tokens, head_dim,
            ENTRIES=len(history), BLOCK=plan.block, DIM_TILE=triton.next_power_of_2(head_dim),
        )  # fmt: skip
