"""Limits and constants that the launchers of Hopper's kernels share; the numbers match the CUDA sources."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dit_accel.kernels._cuda.runtime import Defines
from dit_accel.kernels._cuda.tensor_map import tensor_map_limit
from dit_accel.kernels.symbols import AttentionPlan

BLOCK = 128
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
THREADS = 384


def hopper_kernel_limit(x: torch.Tensor, name: str, head_dim: int, plan: AttentionPlan) -> str | None:
    """Return why the kernels on Hopper do not support an op's main argument ``x`` with this head dimension, or None."""
    if x.numel() == 0:
        return f"{name} must not be empty, got {list(x.shape)}"
    if x.dtype not in DTYPES:
        return f"{name} must be float16 or bfloat16, got {x.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, got {head_dim}"
    if plan.block != BLOCK:
        return f"the plan's block must be {BLOCK}, got {plan.block}"
    return None


def tensor_maps_limit(named: Iterable[tuple[str, torch.Tensor | None]]) -> str | None:
    """Return why the copy engine does not support the given tensors, or None."""
    return next((found for name, x in named if x is not None and (found := tensor_map_limit(name, x))), None)


def element_defines(x: torch.Tensor, head_dim: int) -> Defines:
    return ("HEAD_DIM", head_dim), ("ELEMENT_BF16", int(x.dtype == torch.bfloat16))
