"""Where kernels of ours stand in for torch's: what they take, and where they are faster."""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from dit_accel.kernels import lower, pack_bits
from dit_accel.kernels.backends import hopper_limit, resolve_backend
from dit_accel.kernels.checks import FLOAT_DTYPES, triton_limit
from dit_accel.kernels.kept import Kept
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols

KERNEL_BLOCK = 128  # tokens; the Hopper kernels take no other
MOST_PLANS = 4  # two branches, and the tokens of one rank with those of all
KERNEL_HEAD_DIMS = (64, 128)  # that the kernels of every GPU take
KERNEL_TOKENS = 24576  # where our dense attention begins to beat cuDNN's on Hopper: 1.00x at 17K tokens, 1.09x at 33K


def why_no_kernels(x: torch.Tensor, head_dim: int | None = None) -> str | None:
    """Why kernels can't work on such a tensor, or None.

    Args:
        head_dim: of attention, which on a GPU is for kernels alone, as the reference is slower than dense attention.
    """
    if x.dtype not in FLOAT_DTYPES:
        return f"computes in {x.dtype}, which kernels do not take"
    return None if head_dim is None or not x.is_cuda else triton_limit(head_dim)


def can_fuse_kernels(x: torch.Tensor, head_dim: int) -> bool:
    """Whether norms, modulations, RoPE and GELU run fused: in half precision on a GPU with Triton.

    Not under autocast, which casts what modules get, and not where gradients are wanted.
    """
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    is_plain = not torch.is_autocast_enabled("cuda") and not torch.is_grad_enabled()
    return is_plain and resolve_backend("auto", x) == "triton" and head_dim in KERNEL_HEAD_DIMS


def wins_dense(q: torch.Tensor) -> bool:
    """Whether dense attention of q ``[B, S, H, D]`` is fastest in our kernel, and no other backend was asked for."""
    chosen, _ = _AttentionBackendRegistry.get_active_backend()
    return chosen == AttentionBackendName.NATIVE and q.shape[1] >= KERNEL_TOKENS and hopper_limit(q) is None


class EveryRow:
    """Plans under which everything computes, in the blocks that every backend takes; the latest are kept."""

    def __init__(self) -> None:
        self._plans: Kept[AttentionPlan] = Kept(MOST_PLANS)

    def __call__(self, batch: int, tokens: int, heads: int, device: torch.device) -> AttentionPlan:
        """The plan of attention over so many tokens and heads."""

        def make() -> AttentionPlan:
            rows = torch.ones(batch, block_count(tokens, KERNEL_BLOCK), heads, dtype=torch.bool, device=device)
            return lower(SparseSymbols(pack_bits(rows), None, heads, tokens, KERNEL_BLOCK))

        return self._plans.get((batch, tokens, heads, device), make)
