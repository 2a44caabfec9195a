"""Exact conversion between masks over (query, key) pairs and symbols with masks inside tiles.

A tile in which no pair attends is skipped, and a tile in which all pairs attend is FULL. A diagonal tile in which each
query attends to itself and to earlier keys is CAUSAL. Any other tile is PARTIAL, with its pairs as bits in a pool,
where equal masks share an entry (OmniAttention, section 4.1). Pairs beyond the end of the sequence are 0 there.

Making symbols makes the host wait for the device, so make them once for many steps.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks, symbols
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.packing import pack_bits, unpack_bits
from dit_accel.kernels.plans.lowering import lower
from dit_accel.kernels.plans.regions import listed_tiles

# Indices (sample, head, query block, key block) of n tiles -> their pairs, bool [n, block, block].
PairsOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plan_from_mask(
    mask: torch.Tensor, *, block: int = 128, batch: int | None = None, heads: int | None = None
) -> symbols.AttentionPlan:
    """Return the plan that attends as a mask does."""
    return lower(symbols_from_mask(mask, block=block, batch=batch, heads=heads))


def symbols_from_mask(
    mask: torch.Tensor, *, block: int = 128, batch: int | None = None, heads: int | None = None
) -> symbols.SparseSymbols:
    """Return the symbols of a mask; every row computes, even without any key.

    Args:
        mask: bool ``[B or 1, H or 1, S, S]``; True = the query (third axis) attends to the key (fourth).
        block: tokens in a block, 64 or 128.
        batch, heads: B and H; None = the mask's own.
    """
    checks.require_dtype("mask", mask, (torch.bool,))
    batch, heads = (size if count is None else count for size, count in zip(mask.shape, (batch, heads), strict=False))
    tokens = mask.shape[-1]
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if not fits or mask.shape[2] != tokens or tokens == 0:
        raise ShapeError(f"mask must have shape [{batch} or 1, {heads} or 1, S, S], got {list(mask.shape)}")
    blocks = block_count(tokens, block)
    extra = blocks * block - tokens
    padded = F.pad(mask, (0, extra, 0, extra))
    tiles = padded.unflatten(3, (blocks, block)).unflatten(2, (blocks, block)).transpose(3, 4)
    return _symbols(tiles.sum((-2, -1)), lambda *index: tiles[index], tokens, block, batch, heads)


def symbols_from_intervals(
    first: torch.Tensor, end: torch.Tensor, *, block: int = 128, batch: int = 1, heads: int = 1
) -> symbols.SparseSymbols:
    """Return the symbols of a mask in which each query attends to a few intervals of keys, without the S × S mask.

    Args:
        first, end: integers ``[S, N]``; query q attends to keys ``first[q, n] .. end[q, n] - 1`` for each n; an
            interval may be empty. A query's N intervals must not overlap; indices outside ``0 .. S - 1`` are ignored.
        block: tokens in a block, 64 or 128.
        batch, heads: B and H; all share the mask.
    """
    tokens, runs = first.shape
    blocks = block_count(tokens, block)
    extra = blocks * block - tokens
    end = end.long().clamp(0, tokens)
    first = torch.minimum(first.clamp(0), end)
    first, end = (F.pad(bound, (0, 0, 0, extra)).view(blocks, block, runs) for bound in (first, end))
    attending = _keys_before(end, blocks) - _keys_before(first, blocks)

    def pairs_of(_sample, _head, row, column):
        key = (column * block)[:, None] + torch.arange(block, device=first.device)
        key = key[:, None, None]  # [n, block, N, block] against [n, block, N, 1]
        return ((key >= first[row][..., None]) & (key < end[row][..., None])).any(2)

    return _symbols(attending[None, None], pairs_of, tokens, block, batch, heads)


def _keys_before(bound: torch.Tensor, blocks: int) -> torch.Tensor:
    """Count each tile's keys before bounds ``[Tq, block, N]``, summed over a row's bounds: ``[Tq, Tk]``."""
    block = bound.shape[1]
    tile, rest = (bound // block).flatten(1), (bound % block).flatten(1)
    none = tile.new_zeros(len(tile), blocks + 1)
    reaching = none.scatter_add(1, tile, torch.ones_like(tile)).flip(1).cumsum(1).flip(1)  # bounds in it or behind it
    return (reaching * block)[:, 1:] + none.scatter_add(1, tile, rest)[:, :-1]


def mask_from_plan(plan: symbols.AttentionPlan) -> torch.Tensor:
    """Return the pairs that attend, bool ``[B, H, S, S]``, single keys included; none in a reused row.

    Undoes :func:`plan_from_mask`.
    """
    batch, heads, blocks, block = plan.batch, plan.heads, plan.blocks, plan.block
    tiles = listed_tiles(plan)
    pairs = tiles[:, :, :, None, :, None].expand(-1, -1, -1, block, -1, block).contiguous()
    by_tile = pairs.transpose(3, 4)  # [B, H, Tq, Tk, block, block]
    if plan.masks is not None:
        codes = plan.masks.codes.expand_as(tiles)
        causal = (tiles & (codes == symbols.CAUSAL_TILE)).nonzero(as_tuple=True)
        by_tile[causal] = _causal_pairs(causal[2], causal[3], block)
        partial = (tiles & (codes >= symbols.FIRST_PARTIAL_TILE)).nonzero(as_tuple=True)
        by_tile[partial] = unpack_bits(plan.masks.pool, block)[codes[partial] - symbols.FIRST_PARTIAL_TILE]
    if plan.slices is not None:
        keys = unpack_bits(plan.slices.bits, blocks * block) & (plan.slices.count > 0)[..., None]
        pairs |= keys.view(batch, heads, blocks, 1, blocks, block)
    return pairs.flatten(4).flatten(2, 3)[:, :, : plan.tokens, : plan.tokens]


def _symbols(
    attending: torch.Tensor, pairs_of: PairsOf, tokens: int, block: int, batch: int, heads: int
) -> symbols.SparseSymbols:
    """Make symbols from ``attending``, the number of pairs of each tile, integers ``[B or 1, H or 1, Tq, Tk]``."""
    blocks = attending.shape[-1]
    inside = torch.arange(blocks * block, device=attending.device).view(blocks, block) < tokens
    length = inside.sum(1)
    tiles = attending > 0
    masked = (tiles & (attending < length[:, None] * length)).nonzero(as_tuple=True)
    _, _, row, column = masked
    pairs = pairs_of(*masked)
    causal_pairs = _causal_pairs(row, column, block) & inside[row][:, :, None]
    is_causal = (row == column) & (pairs == causal_pairs).flatten(1).all(1)
    entries = pack_bits(pairs[~is_causal])
    words, place = entries.flatten(1).view(torch.int64).unique(dim=0, return_inverse=True)
    pool = words.view(torch.uint8).view(-1, *entries.shape[1:])
    codes = torch.full(attending.shape, symbols.FULL_TILE, dtype=torch.int32, device=attending.device)
    kinds = torch.full_like(row, symbols.CAUSAL_TILE)
    kinds[~is_causal] = symbols.FIRST_PARTIAL_TILE + place
    codes[masked] = kinds.int()
    masks = symbols.TileMasks(codes, pool) if len(row) else None
    every_row = torch.ones(batch, blocks, heads, dtype=torch.bool, device=tiles.device)
    skip_bits = pack_bits(tiles).expand(batch, heads, -1, -1).contiguous()
    return symbols.SparseSymbols(pack_bits(every_row), skip_bits, heads, tokens, block, masks)


def _causal_pairs(row: torch.Tensor, column: torch.Tensor, block: int) -> torch.Tensor:
    """Pairs of tiles whose key comes no later than their query, bool ``[n, block, block]``."""
    token = torch.arange(block, device=row.device)
    return ((column * block)[:, None] + token)[:, None, :] <= ((row * block)[:, None] + token)[:, :, None]
