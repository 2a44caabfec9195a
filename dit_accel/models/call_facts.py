"""Facts of one transformer call whose blocks run, read before the first block and fixed for the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dit_accel.models.families.family import Tokens
from dit_accel.models.parallel.context_parallel import Exchange
from dit_accel.models.samples import TextLengths
from dit_accel.sparse.token_order import Grid


@dataclass(frozen=True)
class CallFacts:
    """Facts that the blocks of one call share.

    Args:
        fuses: blocks run through fused kernels.
        text: lengths of the prompts; None = the call has no mask, or attention is left to diffusers.
        joint: the joint sequence, where the preset works inside of the transformer; else None.
        exchange: exchange of tokens for heads between devices; None = one device, or a ring of devices.
        grid: grid of the vision tokens if blocks get them in the preset's order; None = raster order.
    """

    fuses: bool = False
    text: TextLengths | None = None
    joint: Tokens | None = None
    exchange: Exchange | None = None
    grid: Grid | None = None

    def of_rows(self, rows: Sequence[int]) -> CallFacts:
        """Facts of a call for some samples of the batch."""
        return self if self.text is None else replace(self, text=self.text.of_rows(rows))


NO_CALL = CallFacts()
