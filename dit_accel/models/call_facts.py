"""Facts of one transformer call whose blocks run, read before the first block and fixed for the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, Family, Tokens, latents_of
from dit_accel.models.kernel_limits import can_fuse_kernels
from dit_accel.models.parallel.context_parallel import Exchange, Exchanges, config_of, parallel_degree, shares_layers
from dit_accel.models.samples import TextLengths, TextMasks
from dit_accel.models.token_order_hook import TokenOrder
from dit_accel.presets import Preset
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


class CallReader:
    """Reads the facts of a transformer's calls from their arguments.

    Args:
        transformer, family: the transformer, and its family's facts.
        preset: the preset of the acceleration.
        has_fused: True if the family has blocks with fused kernels.

    Attributes:
        order: the preset's token order if the transformer can take it; None = raster.
    """

    def __init__(self, transformer: nn.Module, family: Family, preset: Preset, *, has_fused: bool) -> None:
        self.transformer = transformer
        self.family = family
        self.order: TokenOrder | None = None
        self._preset = preset
        self._has_fused = has_fused
        self._masks = TextMasks()
        self._exchanges = Exchanges()
        self._grid: Grid | None = None  # of the latest call's vision tokens, where they have an order

    @property
    def latest_order(self) -> torch.Tensor | None:
        """Order of the latest call's vision tokens, int64 ``[S]``; None = raster."""
        return None if self.order is None or self._grid is None else self.order.of(self._grid)

    def read(self, arguments: Arguments, *, is_compiled: bool) -> tuple[Arguments, CallFacts]:
        """Return a call's arguments, with removable padding cut off, and its facts.

        Args:
            is_compiled: True if the transformer is compiled whole.
        """
        arguments, text = self.cut(arguments, is_compiled=is_compiled)
        latents, tokens = next(iter(latents_of(arguments)), None), self.family.tokens(self.transformer, arguments)
        can_fuse = self._has_fused and latents is not None and not is_compiled
        features = arguments.get(self.family.computes_in, latents)
        self._grid = None if self.order is None else tokens.grid
        is_parallel, exchange = config_of(self.transformer) is not None, None
        if is_parallel:
            exchange = self._exchanges.of(self.transformer, tokens, self.latest_order, latents.device)
        return arguments, CallFacts(
            fuses=can_fuse and not shares_layers(self.transformer) and self.fuses_kernels(features),
            text=text,
            joint=tokens if self._preset.works_inside else None,
            exchange=exchange,
            grid=None if is_parallel else self._grid,  # attention alone sees the tokens of all devices
        )

    def cut(self, arguments: Arguments, *, is_compiled: bool) -> tuple[Arguments, TextLengths | None]:
        """Cut padding off where the family can, and return the arguments and the lengths of the prompts.

        None = the lengths are not needed: no padding is cut off, and no attention is caught.
        """
        text, mask = arguments.get("encoder_hidden_states"), arguments.get(self.family.text_mask)
        if text is None or mask is None:
            return arguments, None
        cuts = self.cuts_padding(text.device, is_compiled)
        if not cuts and self._preset.skip.steps != "all":
            return arguments, None
        lengths = self._masks.lengths(mask)
        if cuts:
            lengths = lengths.divisible(parallel_degree(self.transformer), mask.shape[1])
            return self.family.cut(arguments, lengths)
        return arguments, lengths

    def cuts_padding(self, device: torch.device, is_compiled: bool) -> bool:
        """Return True if padding is cut off: if tiles, rows or layers may be skipped, on a GPU, or on several devices.

        On a CPU it stays otherwise, so that steps equal diffusers' bit by bit. In a transformer that is compiled whole
        it stays so that prompts of other lengths need no recompilation. It stays if the caller's own plan splits the
        tokens of several devices, because theirs must divide evenly.
        """
        if self.family.cut is None:
            return False
        if config_of(self.transformer) is not None:
            return self.family.split is not None
        return self._preset.works_inside or (device.type != "cpu" and not is_compiled)

    def fuses_kernels(self, x: torch.Tensor) -> bool:
        """Return True if blocks with features like ``x`` run through fused kernels."""
        _, head_dim = self.family.heads(self.transformer)
        return can_fuse_kernels(x, head_dim)
