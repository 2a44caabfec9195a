"""What families with hooks on their blocks share: putting the hooks on and taking them off, and counting FLOPs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.kernels import lower, pack_bits
from dit_accel.kernels.backends import hopper_limit, resolve_backend
from dit_accel.kernels.layout import TokenLayout, block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.loop.branch import Call
from dit_accel.loop.tracker import StepMode
from dit_accel.models import TRANSFORMER_NAMES
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.transformer_hook import GenericAdapter, is_compiled, register_hook, remove_hook
from dit_accel.sparse.projections import Projections

KERNEL_BLOCK = 128  # tokens; the Hopper kernels take no other
KERNEL_HEAD_DIMS = (64, 128)  # that the kernels of every GPU take
KERNEL_TOKENS = (
    24576  # from about here on our dense attention beats cuDNN's on Hopper: 1.00x at 17K tokens, 1.09x at 33K
)


@dataclass(frozen=True)
class BlockWork:
    """FLOPs of one block of a plain call, by what they scale with.

    Args:
        rows: what only rows that compute need: projections of their queries and of their attention outputs.
        row_blocks: what only row-blocks need in which any head computes.
        tiles: attention.
        rest: all else.
        bias: output projection of all rows, of which an UPDATE does a part once more for each older step that it
            remembers.
    """

    rows: float
    tiles: float
    rest: float
    bias: float
    row_blocks: float = 0.0

    @property
    def plain(self) -> float:
        return self.rows + self.row_blocks + self.tiles + self.rest


class BlockAdapter(GenericAdapter, ABC):
    """Levels ``output``, ``layer`` and ``head``, and on a GPU fused kernels in every block that computes."""

    levels = ("output", "layer", "head")
    fuses = False  # whether blocks run through fused kernels in the call in progress
    _every_row: AttentionPlan | None = None

    @abstractmethod
    def blocks(self) -> dict[str, nn.Module]:
        """The transformer's blocks in order, by name."""

    @abstractmethod
    def hook(self, name: str, block: nn.Module) -> BlockHook:
        """A new hook for a block."""

    @abstractmethod
    def layout(self, arguments: dict[str, Any]) -> TokenLayout:
        """Tokens of the attention that sites skip in, from the arguments of a transformer call."""

    @abstractmethod
    def work(self, arguments: dict[str, Any]) -> BlockWork:
        """FLOPs of one block in a transformer call with these arguments; all blocks do the same."""

    @property
    def works_inside(self) -> bool:
        """Whether the preset asks for anything inside the transformer."""
        preset = self.controller.preset
        return preset.forecast.level != "output" or preset.skip.steps == "all"

    def fuses_kernels(self, x: torch.Tensor) -> bool:
        """Whether norms, modulations, RoPE and GELU run fused: in half precision on a GPU with Triton.

        Not under autocast, which casts what modules get, and not where gradients are wanted.
        """
        if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
            return False
        is_plain = not torch.is_autocast_enabled("cuda") and not torch.is_grad_enabled()
        can_run = resolve_backend("auto", x) == "triton"
        return is_plain and can_run and self.transformer.config.attention_head_dim in KERNEL_HEAD_DIMS

    def attends_by_kernel(self, q: torch.Tensor) -> bool:
        """Whether dense attention of q ``[B, S, H, D]`` runs in our kernel: where that is fastest, unless told else."""
        chosen, _ = _AttentionBackendRegistry.get_active_backend()
        told = chosen != AttentionBackendName.NATIVE or self.controller.preset.kernels.attention == "reference"
        return self.fuses and not told and q.shape[1] >= KERNEL_TOKENS and hopper_limit(q) is None

    def forward(self, original: Any, context: str | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One transformer call, with fused kernels where they can run.

        Raises:
            UnsupportedError: blocks are compiled that the preset works inside of.
        """
        compiled = next((name for name, block in self.blocks().items() if is_compiled(block)), None)
        if compiled is not None and self.works_inside:
            raise UnsupportedError(
                f"block {compiled} is compiled, and preset {self.controller.preset.name!r} works inside of blocks: "
                "take one of level output that leaves no tiles out, or don't compile the blocks"
            )
        latents = self.named(args, kwargs).get("hidden_states")
        self.fuses = isinstance(latents, torch.Tensor) and self.fuses_kernels(latents)
        try:
            return super().forward(original, context, args, kwargs)
        finally:
            self.fuses = False

    def every_row(self, batch: int, tokens: int, heads: int, device: torch.device) -> AttentionPlan:
        """A plan under which everything computes, in the blocks that every backend takes; the latest is kept."""
        plan = self._every_row
        if plan is None or (batch, tokens, heads, device) != (plan.batch, plan.tokens, plan.heads, plan.mask64.device):
            rows = torch.ones(batch, block_count(tokens, KERNEL_BLOCK), heads, dtype=torch.bool, device=device)
            self._every_row = plan = lower(SparseSymbols(pack_bits(rows), None, heads, tokens, KERNEL_BLOCK))
        return plan

    def layers(self) -> list[str]:
        return list(self.blocks())

    def prepare(self) -> None:
        head_dim = self.transformer.config.attention_head_dim
        self.projections = Projections(
            self.controller.preset.skip, self.name, TRANSFORMER_NAMES, self.layers(), head_dim
        )

    def attach(self, acceleration: Any) -> None:
        super().attach(acceleration)
        for name, block in self.blocks().items():
            register_hook(block, self.hook(name, block))

    def detach(self) -> None:
        super().detach()
        for block in self.blocks().values():
            remove_hook(block)

    def account(self, call: Call, arguments: dict[str, Any]) -> None:
        """FLOPs of each block, linear layers and attention, from the densities that its site had."""
        if call.symbols:
            self.controller.last_layout = self.layout(arguments)
        work = self.work(arguments)
        for name in self.layers():
            call.work[name] = (self._computed(call, name, work), work.plain)

    def _computed(self, call: Call, name: str, work: BlockWork) -> float:
        level, site = self.controller.preset.forecast.level, call.branch.sites.get(name)
        if call.mode is StepMode.DISPATCH:
            if name in call.dense:
                return work.plain
            if level != "head" or site.degraded:
                return 0.0
            rows = work.rows * site.row_density + work.row_blocks * site.row_block_density
            return rows + work.tiles * site.tile_density + work.rest
        if site is None or site.measured_step != call.tick.step:
            return work.plain
        older = len(site.bias_coordinates[1:])
        left_out = 1 - site.attended - site.probed
        return work.plain - work.tiles * left_out + work.bias * site.bias_density * older


def joint_work(batch: int, tokens: int, width: int, mlp_ratio: float) -> BlockWork:
    """FLOPs of a block with q, k, v and output projections, joint attention and an MLP of ``mlp_ratio · width``."""
    projection = 2 * batch * tokens * width * width
    return BlockWork(
        rows=2 * projection,
        tiles=4 * batch * tokens * tokens * width,
        rest=(2 + 2 * mlp_ratio) * projection,
        bias=projection,
    )
