"""Interface of a policy, for sites and tools."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dit_accel.kernels.layout import TokenLayout, block_count
from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.plans.pooling import PooledMap
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols


class Policy(ABC):
    """Compute the symbols of an attention; each subclass has its own file and overrides some defaults.

    ``config`` is the policy's section ``skip`` of a preset, for one block.
    """

    leaves_out = True  # False: attention is dense, and the site computes no symbols

    @abstractmethod
    def draw(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layout: TokenLayout,
        config: Any,
        *,
        kv_len: torch.Tensor | None = None,
        pooled: PooledMap | None = None,
    ) -> SparseSymbols:
        """Return the symbols of one attention, under which every row computes, without a wait for the GPU.

        ``pooled`` is the pooled map of these q and k ``[B, S, H, D]``; None = the policy computes it if it needs it.
        """

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

    def target_error(self, config: Any) -> float | None:
        """Return the bound on the error on the probe's rows, which :meth:`ramped` enforces; None = no bound."""
        return None

    def projection(self, config: Any) -> str | None:
        """Return the file of learned matrices ``[D, D]`` for :meth:`add`; None = the policy needs none."""
        return None

    def add(
        self,
        o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        config: Any,
        *,
        projection: torch.Tensor | None,
        kv_len: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> torch.Tensor:
        """Return attention's output ``o`` ``[B, S, H, D]`` with an extra pass added in place; by default unchanged."""
        return o

    def thresholds(self, config: Any) -> Mapping[str, Sequence[float]]:
        """Return the values that ``dit-accel tune`` tries, by key of the section, from most accurate to cheapest.

        Tuning varies the last key for each combination of the others. Empty = it measures the preset's own keys.
        """
        return {}

    def fitted(self, config: Any, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the changes, extended by changes of other keys that they need."""
        return changes


def every_row(q: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """Return ``cache_bits`` under which all rows of ``q`` ``[B, S, H, D]`` compute: uint8 ``[B, T, ceil(H / 8)]``."""
    return pack_bits(torch.ones(q.shape[0], layout.blocks, q.shape[2], dtype=torch.bool, device=q.device))
