"""How long the prompts of a batch are, from the mask that a transformer gets with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.loop.rows import take_rows


@dataclass(frozen=True)
class TextLengths:
    """Text tokens of each sample that attention may read; they come first.

    Args:
        lengths: one a sample, or one for all.
        counts: the same on the device, int32 ``[B]``.
        end: text tokens behind which every sample has padding only.
        leading: whether all that count come first.
    """

    lengths: tuple[int, ...]
    counts: torch.Tensor
    end: int
    leading: bool = True

    @property
    def ragged(self) -> bool:
        """Whether some sample still has padding among its first ``end`` tokens."""
        return min(self.lengths) < self.end

    def of_rows(self, rows: Sequence[int]) -> TextLengths:
        """Those of some samples."""
        if len(self.lengths) == 1:
            return self
        lengths = tuple(self.lengths[row] for row in rows)
        return TextLengths(lengths, take_rows(self.counts, rows), self.end, self.leading)


class TextMasks:
    """Reads masks, each once: pipelines pass one object at every step."""

    def __init__(self) -> None:
        self._measured = WeakIdKeyDictionary()  # mask -> its version, TextLengths

    def lengths(self, mask: torch.Tensor) -> TextLengths:
        """The prompts' lengths from the mask ``[B, T]``; one host synchronisation a mask.

        A transformer reads as many text tokens as the mask has ones, wherever they are, and a text refiner reads those
        that the mask marks.
        """
        version = 0 if mask.is_inference() else mask._version
        known = self._measured.get(mask)
        if known is None or known[0] != version:
            counts = mask.sum(dim=1, dtype=torch.int32).clamp(min=1)  # no prompt at all is no number in diffusers
            position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            last = (position * (mask != 0)).amax(dim=1)
            lengths, ends = torch.stack([counts, last]).tolist()
            leading = all(length == max(end, 1) for length, end in zip(lengths, ends, strict=True))
            found = TextLengths(tuple(lengths), counts, max(*lengths, *ends), leading)
            self._measured[mask] = known = version, found
        return known[1]
