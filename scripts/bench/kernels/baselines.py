"""Baselines: dense attention of cuDNN and FlashAttention 2 and 4, block-sparse FlexAttention, and ``F.linear``.

A baseline that is not installed, does not run on this GPU or gives wrong results is left out; the report says why.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.backends import hopper_limit
from scripts.bench.kernels.cases import Inputs

Attention = Callable[[], torch.Tensor]  # -> [B, S, H, D]
DENSE = {"cpu": ("sdpa",), "cuda": ("cudnn", "fa2", "fa4")}  # by device; speed-ups are over the first
SPARSE = {"cpu": (), "cuda": ("flex",)}
SDPA_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


def baseline(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: Inputs) -> Attention:
    """Return the named attention over q, k, v ``[B, S, H, D]``; sparse baselines use the tiles of ``inputs``."""
    if name == "flex":
        return _flex(q, k, v, inputs)
    if name == "fa4":
        if limit := hopper_limit(q):
            raise UnsupportedError(f"flash-attn-4 is compared on Hopper: {limit}")
        return lambda: _fa4()(q, k, v)[0]
    return functools.partial(sdpa, name, q, k, v)


def sdpa(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Run torch's attention over ``[B, S, H, D]`` with the named backend; for "sdpa" torch chooses the backend."""
    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(SDPA_BACKENDS[name]) if name in SDPA_BACKENDS else nullcontext():
        return F.scaled_dot_product_attention(*arguments).transpose(1, 2)


def _flex(q, k, v, inputs: Inputs) -> Attention:
    from torch.nn.attention.flex_attention import BlockMask

    plan = inputs.plan
    full_count = plan.kv_count if plan.full_count is None else plan.full_count
    slot = torch.arange(plan.blocks, device=q.device)
    masked_index = plan.kv_index.gather(-1, (full_count[..., None].long() + slot).clamp(max=plan.blocks - 1))
    mask = BlockMask.from_kv_blocks(
        kv_num_blocks=plan.kv_count - full_count,
        kv_indices=masked_index,
        full_kv_num_blocks=full_count,
        full_kv_indices=plan.kv_index,
        BLOCK_SIZE=plan.block,
        mask_mod=lambda batch, head, query, key: query >= 0,
        seq_lengths=(plan.tokens, plan.tokens),
    )
    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    return lambda: _compiled_flex()(*arguments, block_mask=mask).transpose(1, 2)


@functools.cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # Each shape is compiled separately for best speed; by default torch stops after 8 shapes and runs uncompiled.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _fa4() -> Callable:
    from flash_attn.cute.interface import flash_attn_func

    return flash_attn_func
