"""Masks that do not depend on queries and keys, built tile by tile without an S × S mask; every row computes.

Causal, packed documents, and text interleaved with images are OmniAttention's (section 3.1.2). Policy ``static`` of
presets also has a sliding window.

>>> plan = lower(block_mask_from_segments([133, 309, 70], causal=[True, False, True], past=True))  # text, image, text
"""

from collections.abc import Sequence

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.kept import Kept
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.tile_masks import symbols_from_intervals
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.presets.skip import StaticSkip
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.policies.policy import Policy

_SYMBOLS: Kept[SparseSymbols] = Kept(16)  # a pipeline has one or two layouts, and a few layers with another pattern


def block_mask_from_segments(
    lengths: Sequence[int],
    *,
    causal: bool | Sequence[bool] = False,
    past: bool = False,
    device: str | torch.device = "cpu",
    **options: int,
) -> SparseSymbols:
    """Return the symbols of a sequence of segments, each of which attends to itself.

    Args:
        lengths: tokens of each segment, at least 1, in the order of the sequence.
        causal: True = a query attends to its own segment up to its own place; False = to the whole segment. One value
            for each segment, or one for all.
        past: True = a query also attends to all earlier segments.
        device: device of the symbols.
        options: ``block``, tokens in a block, 64 or 128 (default); ``batch`` and ``heads`` (1), which share the mask.

    Raises:
        ShapeError: there is no segment, a length is below 1, or ``causal`` has another number of entries.
    """
    causal = [causal] * len(lengths) if isinstance(causal, bool) else list(causal)
    if not lengths or min(lengths) < 1:
        raise ShapeError(f"lengths must be one or more numbers, each at least 1, got {list(lengths)}")
    if len(causal) != len(lengths):
        raise ShapeError(f"causal must have one entry for each of {len(lengths)} segments, got {len(causal)}")
    length = torch.tensor(lengths, device=device)
    ends = length.cumsum(0)
    query = torch.arange(sum(lengths), device=device)
    is_causal = torch.tensor(causal, device=device).repeat_interleave(length)
    first = torch.zeros_like(query) if past else (ends - length).repeat_interleave(length)
    end = torch.where(is_causal, query + 1, ends.repeat_interleave(length))
    return symbols_from_intervals(first[:, None], end[:, None], **options)


class Static(Policy):
    """Apply ``config.pattern`` to vision tokens; text attends to all tokens, and all tokens attend to text."""

    def draw(self, inputs: Inputs, config: StaticSkip) -> SparseSymbols:
        """Return the symbols of a layout, which are computed once and shared by all sites and steps."""
        q = inputs.q
        key = inputs.layout, config.pattern, config.window, q.shape[0], q.shape[2], q.device
        return _SYMBOLS.get(key, lambda: _symbols_of_layout(*key))

    def plan_entries(self, rows: int) -> int:
        return rows


def _symbols_of_layout(
    layout: TokenLayout, pattern: str, window: int | None, batch: int, heads: int, device: torch.device
) -> SparseSymbols:
    query = torch.arange(layout.tokens, device=device)
    first, end = (torch.zeros_like(query), query + 1) if pattern == "causal" else _around(query, window)
    vision_end = layout.vision_start + layout.vision
    is_text = (query < layout.vision_start) | (query >= vision_end)
    first = first.clamp(min=layout.vision_start).masked_fill_(is_text, layout.vision_start)
    end = end.clamp(max=vision_end).masked_fill_(is_text, vision_end)
    text_start = 0 if layout.text_first else layout.vision
    first = torch.stack([first, torch.full_like(first, text_start)], 1)
    end = torch.stack([end, torch.full_like(end, text_start + layout.text)], 1)
    return symbols_from_intervals(first, end, block=layout.block, batch=batch, heads=heads)


def _around(query: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key of the window around each query, and the key after its last."""
    first = query - window // 2
    return first, first + window
