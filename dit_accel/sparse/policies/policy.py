"""Interface of a policy, for sites and tools."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dit_accel.kernels.layout import TokenLayout, block_count
from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.sparse.inputs import Inputs, Projection


class Policy(ABC):
    """Compute the symbols of an attention; each subclass has its own file and overrides some defaults.

    ``config`` is the policy's section ``skip`` of a preset, for one block.
    """

    leaves_out = True  # False: attention is dense, and the site computes no symbols
    needs_grid = False  # True: the tokens are those of one video, all of them and no text
    projects_heads = False  # True: learned projections are over the features of all heads, and not of one

    @abstractmethod
    def draw(self, inputs: Inputs, config: Any) -> SparseSymbols:
        """Return the symbols of one attention, under which every row computes, without a wait for the GPU."""

    def attend(
        self, attend: Callable[[Inputs], torch.Tensor], inputs: Inputs, projection: Projection | None
    ) -> torch.Tensor:
        """Return ``attend(inputs)``, attention ``[B, S, H, D]`` under new symbols; by default as it is."""
        return attend(inputs)

    def row_bytes(self, layout: TokenLayout) -> int:
        """Return the bytes of the symbols for one row of a head; by default one bit a tile."""
        return block_count(layout.blocks, 8)

    def plan_entries(self, rows: int) -> int:
        """Return the int32 entries of a plan of ``rows`` rows, without the list of its tiles."""
        return 0

    def keeps_scores(self, config: Any) -> bool:
        """Return True if computing the symbols computes all scores.

        A step that computes masks for later steps then attends to all keys, which costs nothing more.
        """
        return False

    def options(self, config: Any) -> dict[str, Any]:
        """Return this policy's extra arguments of :func:`~dit_accel.kernels.attention`."""
        return {}

    def ramped(self, config: Any, growth: float) -> Any:
        """Return the section with its left-out share scaled by ``growth``, 0..1; by default unchanged.

        The growth is small early in a run at level head, and after the probe found too large an error.
        """
        return config

    def add(
        self,
        o: torch.Tensor,
        qkv: Sequence[torch.Tensor],
        plan: AttentionPlan,
        config: Any,
        projection: Projection | None,
        **options: Any,
    ) -> torch.Tensor:
        """Return attention's output ``o`` ``[B, S, H, D]`` with an extra pass added in place; by default unchanged."""
        return o

    def thresholds(self, config: Any) -> Mapping[str, Sequence[float]]:
        """Return the values that ``dit-accel tune`` tries, by key of the section, from most accurate to cheapest.

        Tuning varies the last key for each combination of the others. Empty = it measures the preset's own keys.
        """
        return {}


def every_row(q: torch.Tensor, layout: TokenLayout, skip_bits: torch.Tensor | None, **lists: Any) -> SparseSymbols:
    """Return symbols under which all rows of ``q`` ``[B, S, H, D]`` compute, with ``lists`` of their constructor."""
    rows = pack_bits(torch.ones(q.shape[0], layout.blocks, q.shape[2], dtype=torch.bool, device=q.device))
    return SparseSymbols(rows, skip_bits, q.shape[2], layout.tokens, layout.block, **lists)
