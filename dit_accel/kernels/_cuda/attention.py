"""Launcher of the Hopper attention kernel, ``attention.cu``."""

from __future__ import annotations

import math

import torch

from dit_accel.kernels._cuda.runtime import kernel, multiprocessors, resting_counters
from dit_accel.kernels._cuda.tensor_map import tensor_map, tensor_map_limit
from dit_accel.kernels.backends import hopper_limit
from dit_accel.kernels.symbols import AttentionPlan

BLOCK = 128
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
THREADS = 384
TILES = 7  # 2 of queries, 3 of keys and 2 of values
SHARED_BEYOND_TILES = 3072
MAX_PROGRAMS = 192
SHARED_ROWS = 4 * MAX_PROGRAMS  # at most, where rows are cut into shares; each has a counter for each consumer
CONSUMER_THREADS = 256


def limit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    pv_threshold: float | None,
    qk_dtype: str | None,
    out: torch.Tensor | None,
) -> str | None:
    """What keeps the kernel from these arguments, or None."""
    if plan.masks is not None:
        return "the plan must have no masks"
    if pv_threshold is not None or qk_dtype is not None:
        return f"pv_threshold and qk_dtype must be None, got {pv_threshold} and {qk_dtype}"
    return tensor_limit(q, k, v, plan, out)


def tensor_limit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, out: torch.Tensor | None
) -> str | None:
    """What keeps Hopper's consumers of 128 by 128 tiles from these tensors, or None."""
    if problem := hopper_limit(q):
        return problem
    if q.dtype not in DTYPES:
        return f"q must be float16 or bfloat16, got {q.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, got {q.shape[-1]}"
    if plan.block != BLOCK:
        return f"the plan's block must be {BLOCK}, got {plan.block}"
    if q.numel() == 0:
        return f"q must not be empty, got {list(q.shape)}"
    named = (("q", q), ("k", k), ("v", v), ("out", out))
    return next((found for name, x in named if x is not None and (found := tensor_map_limit(name, x))), None)


def attention_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_len: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    tokens, heads, head_dim = q.shape[1:]
    programs = min(multiprocessors(q.device), MAX_PROGRAMS)
    part = CONSUMER_THREADS * (head_dim // 2 + 4)
    parts = torch.empty(programs * 2 * part, dtype=torch.float32, device=q.device)
    counters = resting_counters("attention", 2 + 2 * SHARED_ROWS, q.device)
    defines = (
        ("HEAD_DIM", head_dim),
        ("ELEMENT_BF16", int(q.dtype == torch.bfloat16)),
        ("HAS_KV_LEN", int(kv_len is not None)),
    )
    maps = [tensor_map(x, (1, BLOCK, 1, 64)) for x in (q, k, v)] + [tensor_map(out, (1, BLOCK // 2, 1, 64))]
    kernel("attention.cu", "attention", q.device, defines).launch(
        (programs,),
        THREADS,
        (*maps, plan.work, plan.work_count, plan.kv_count, plan.kv_index, kv_len, counters,
         parts, lse, heads, heads // k.shape[2], plan.blocks, tokens, scale * math.log2(math.e)),
        shared_bytes=TILES * BLOCK * head_dim * 2 + SHARED_BEYOND_TILES,
    )  # fmt: skip
