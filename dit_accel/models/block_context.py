"""What the blocks of one transformer share: the run, the call's text, and whether and how kernels of ours run."""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from dit_accel.kernels import lower, pack_bits
from dit_accel.kernels.backends import hopper_limit, resolve_backend
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.loop.controller import Controller
from dit_accel.models.family import Tokens
from dit_accel.models.samples import TextLengths
from dit_accel.sparse.projections import Projections
from dit_accel.sparse.site import SparseSite

KERNEL_BLOCK = 128  # tokens; the Hopper kernels take no other
KERNEL_HEAD_DIMS = (64, 128)  # that the kernels of every GPU take
KERNEL_TOKENS = (
    24576  # from about here on our dense attention beats cuDNN's on Hopper: 1.00x at 17K tokens, 1.09x at 33K
)


class BlockContext:
    """Shared by the hooks on a transformer's blocks.

    Args:
        controller: has the call in progress.
        projections: of SLA's linear attention.
        head_dim: of the transformer's attention.
    """

    def __init__(self, controller: Controller, projections: Projections, head_dim: int) -> None:
        self.controller = controller
        self.projections = projections
        self.fuses = False  # whether blocks run through fused kernels in the call in progress
        self.tokens: Tokens | None = None  # of the call in progress
        self.text: TextLengths | None = None  # of its prompts; None = no mask, or left to diffusers
        self._head_dim = head_dim
        self._every_row: AttentionPlan | None = None

    def site(self, name: str, block: str) -> SparseSite:
        """An attention site in the call in progress; ``block`` is the one whose settings it takes."""
        return SparseSite(name, self.controller.call, self.controller.preset, self.projections, block)

    def fuses_kernels(self, x: torch.Tensor) -> bool:
        """Whether norms, modulations, RoPE and GELU run fused: in half precision on a GPU with Triton.

        Not under autocast, which casts what modules get, and not where gradients are wanted.
        """
        if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
            return False
        is_plain = not torch.is_autocast_enabled("cuda") and not torch.is_grad_enabled()
        return is_plain and resolve_backend("auto", x) == "triton" and self._head_dim in KERNEL_HEAD_DIMS

    def attends_by_kernel(self, q: torch.Tensor) -> bool:
        """Whether dense attention of q ``[B, S, H, D]`` runs in our kernel: where that is fastest, unless told else."""
        chosen, _ = _AttentionBackendRegistry.get_active_backend()
        told = chosen != AttentionBackendName.NATIVE or self.controller.preset.kernels.attention == "reference"
        return self.fuses and not told and q.shape[1] >= KERNEL_TOKENS and hopper_limit(q) is None

    def every_row(self, batch: int, tokens: int, heads: int, device: torch.device) -> AttentionPlan:
        """A plan under which everything computes, in the blocks that every backend takes; the latest is kept."""
        plan = self._every_row
        if plan is None or (batch, tokens, heads, device) != (plan.batch, plan.tokens, plan.heads, plan.mask64.device):
            rows = torch.ones(batch, block_count(tokens, KERNEL_BLOCK), heads, dtype=torch.bool, device=device)
            self._every_row = plan = lower(SparseSymbols(pack_bits(rows), None, heads, tokens, KERNEL_BLOCK))
        return plan
