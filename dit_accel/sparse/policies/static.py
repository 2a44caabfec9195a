"""Masks that do not depend on queries and keys, built tile by tile without an S × S mask.

The patterns are OmniAttention's (section 3.1.2): causal, packed documents, text interleaved with images, and random
FULL / CAUSAL / PARTIAL tiles. In addition there are a sliding window and the policy ``static`` of presets. All return
:class:`~dit_accel.kernels.symbols.SparseSymbols` under which every row computes:

>>> from dit_accel.kernels import lower
>>> plan = lower(interleaved([133, 309, 70], [True, False, True], heads=8))  # text, an image, text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.kept import Kept
from dit_accel.kernels.layout import TokenLayout, block_count
from dit_accel.kernels.symbols import CAUSAL_TILE, FIRST_PARTIAL_TILE, FULL_TILE, SparseSymbols, TileMasks
from dit_accel.kernels.tile_masks import symbols_from_intervals, symbols_of_tiles
from dit_accel.sparse.policies.policy import Policy

if TYPE_CHECKING:
    from dit_accel.presets.skip import StaticSkip

_SYMBOLS: Kept[SparseSymbols] = Kept(16)  # a pipeline has one or two layouts, and a few layers with another pattern
TILE_KINDS = ("full", "causal", "partial")


def block_mask_from_segments(
    lengths: Sequence[int],
    *,
    causal: bool | Sequence[bool],
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
        options: ``block``, tokens in a block, 64 or 128 (default); ``batch`` and ``heads``, which share the mask, 1 by
            default.

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


def causal(tokens: int, **options: Any) -> SparseSymbols:
    """Return a causal mask: each query attends to itself and to earlier keys.

    See :func:`block_mask_from_segments` for the options.
    """
    return block_mask_from_segments([tokens], causal=True, **options)


def documents(lengths: Sequence[int], *, causal: bool | Sequence[bool] = False, **options: Any) -> SparseSymbols:
    """Return the mask of packed documents, which do not attend to each other.

    See :func:`block_mask_from_segments` for the options.
    """
    return block_mask_from_segments(lengths, causal=causal, **options)


def interleaved(lengths: Sequence[int], causal: Sequence[bool], **options: Any) -> SparseSymbols:
    """Return the mask of text, which attends causally, and images, which attend to themselves whole.

    Both attend to all earlier segments. See :func:`block_mask_from_segments` for the options.
    """
    return block_mask_from_segments(lengths, causal=causal, past=True, **options)


def sliding(tokens: int, window: int, *, device: str | torch.device = "cpu", **options: int) -> SparseSymbols:
    """Return a sliding window: query q attends to the ``window`` keys from ``q - window // 2`` on.

    See :func:`block_mask_from_segments` for the options.
    """
    first, end = _around(torch.arange(tokens, device=device), window)
    return symbols_from_intervals(first[:, None], end[:, None], **options)


def random_tiles(
    tokens: int,
    kinds: Sequence[str] = TILE_KINDS,
    *,
    generator: torch.Generator | None = None,
    block: int = 128,
    batch: int = 1,
    heads: int = 1,
    device: str | torch.device = "cpu",
) -> SparseSymbols:
    """Return random tiles on and below the diagonal; in PARTIAL tiles each pair attends with probability ½.

    Args:
        tokens: S.
        kinds: "full", "causal" and "partial"; each is chosen with equal probability.
        generator: random generator on ``device``; None = torch's own.
        block, batch, heads, device: see :func:`block_mask_from_segments`.

    Raises:
        ShapeError: a kind is unknown.
    """
    if not kinds or set(kinds) - set(TILE_KINDS):
        raise ShapeError(f"kinds must be among {TILE_KINDS}, got {tuple(kinds)}")
    blocks = block_count(tokens, block)
    tiles = torch.ones(1, 1, blocks, blocks, dtype=torch.bool, device=device).tril()
    code_of = {"full": FULL_TILE, "causal": CAUSAL_TILE, "partial": FIRST_PARTIAL_TILE}
    choices = torch.tensor([code_of[kind] for kind in kinds], dtype=torch.int32, device=device)
    codes = choices[torch.randint(len(kinds), tiles.shape, generator=generator, device=device)]
    partial = tiles & (codes == FIRST_PARTIAL_TILE)
    count = int(partial.sum())
    codes[partial] += torch.arange(count, dtype=torch.int32, device=device)
    shape = (count, block, block // 8)
    pool = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
    return symbols_of_tiles(tiles, TileMasks(codes, pool), tokens, block, batch, heads)


class Static(Policy):
    """Apply ``config.pattern`` to vision tokens; text attends to all tokens, and all tokens attend to text."""

    def draw(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layout: TokenLayout,
        config: StaticSkip,
        *,
        kv_len: Any = None,
        pooled: Any = None,
    ) -> SparseSymbols:
        """Return the symbols of a layout, which are computed once and shared by all sites and steps."""
        key = layout, config.pattern, config.window, q.shape[0], q.shape[2], q.device
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
