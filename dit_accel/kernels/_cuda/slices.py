"""Launcher of the Hopper kernel for single keys, ``slices.cu``."""

from __future__ import annotations

import ctypes
import math

import torch

from dit_accel.kernels._cuda.attention import BLOCK, MAX_PROGRAMS, SHARED_BEYOND_TILES, THREADS, TILES, tensor_limit
from dit_accel.kernels._cuda.runtime import kernel, multiprocessors, resting_counters, why_not
from dit_accel.kernels._cuda.tensor_map import tensor_map
from dit_accel.kernels.symbols import AttentionPlan


def limit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, out: torch.Tensor) -> str | None:
    """What keeps the kernel from these arguments on the tensors' CUDA device, or None."""
    return why_not(q.device) or tensor_limit(q, k, v, plan, out)


def add_slices_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_len: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    tokens, heads, head_dim = q.shape[1:]
    slices = plan.slices
    defines = (
        ("HEAD_DIM", head_dim),
        ("ELEMENT_BF16", int(q.dtype == torch.bfloat16)),
        ("HAS_KV_LEN", int(kv_len is not None)),
    )
    strided = [(x, *map(ctypes.c_longlong, x.stride()[:3])) for x in (k, v, out)]  # batch, token, head
    kernel("slices.cu", "slices", q.device, defines).launch(
        (min(multiprocessors(q.device), MAX_PROGRAMS),),
        THREADS,
        (tensor_map(q, (1, BLOCK, 1, 64)), tensor_map(out, (1, BLOCK // 2, 1, 64)),
         *strided[0], *strided[1], *strided[2], lse, slices.bits.contiguous(), slices.count,
         slices.work, slices.work_count, plan.kv_count, kv_len, resting_counters("slices", 2, q.device),
         heads, heads // k.shape[2], plan.blocks, tokens, scale * math.log2(math.e)),
        shared_bytes=TILES * BLOCK * head_dim * 2 + SHARED_BEYOND_TILES,
    )  # fmt: skip
