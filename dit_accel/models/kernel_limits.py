"""Limits of our kernels that replace torch's: supported inputs, and sizes at which they are faster."""

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from dit_accel.kernels import lower, pack_bits
from dit_accel.kernels.backends import hopper_limit, resolve_backend
from dit_accel.kernels.checks import FLOAT_DTYPES, triton_limit
from dit_accel.kernels.kept import Kept
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols

KERNEL_BLOCK = 128  # tokens; the only size that the Hopper kernels support
MOST_PLANS = 4  # two branches, each with the tokens of one rank and of all ranks
KERNEL_HEAD_DIMS = (64, 128)  # supported by the kernels of every GPU
KERNEL_TOKENS = 24576  # above, our dense attention beats cuDNN's on Hopper: 1.00x as fast at 17K tokens, 1.09x at 33K


def why_no_kernels(x: torch.Tensor, head_dim: int | None = None) -> str | None:
    """Return why kernels don't support a tensor like ``x``, and ``head_dim`` of attention on a GPU, or None."""
    if x.dtype not in FLOAT_DTYPES:
        return f"computes in {x.dtype}, which kernels do not support"
    # On a GPU our reference of attention is slower than torch's.
    return None if head_dim is None or not x.is_cuda else triton_limit(head_dim)


def why_not_fused(x: torch.Tensor, head_dim: int) -> str | None:
    """Return why norms, modulations, RoPE and GELU of blocks don't run fused, or None."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"they compute in {x.dtype}, not in half precision"
    if torch.is_autocast_enabled("cuda") or torch.is_grad_enabled():
        return "gradients are on, or autocast casts inputs of modules"
    if head_dim not in KERNEL_HEAD_DIMS:
        return f"heads have {head_dim} values, not {' or '.join(map(str, KERNEL_HEAD_DIMS))}"
    return None if x.is_cuda and resolve_backend("auto", x) == "triton" else "they need a GPU with Triton"


def wins_dense(q: torch.Tensor) -> bool:
    """Return True if our kernel is fastest for dense attention of q ``[B, S, H, D]`` and no other backend is set."""
    chosen, _ = _AttentionBackendRegistry.get_active_backend()
    return chosen == AttentionBackendName.NATIVE and q.shape[1] >= KERNEL_TOKENS and hopper_limit(q) is None


class EveryRow:
    """Plans in which every tile computes, with blocks that every backend supports; the latest ones are cached."""

    def __init__(self) -> None:
        self._plans: Kept[AttentionPlan] = Kept(MOST_PLANS)

    def __call__(self, batch: int, tokens: int, heads: int, device: torch.device) -> AttentionPlan:
        def make() -> AttentionPlan:
            rows = torch.ones(batch, block_count(tokens, KERNEL_BLOCK), heads, dtype=torch.bool, device=device)
            return lower(SparseSymbols(pack_bits(rows), None, heads, tokens, KERNEL_BLOCK))

        return self._plans.get((batch, tokens, heads, device), make)
