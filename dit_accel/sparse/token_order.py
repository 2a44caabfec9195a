"""Orders of a clip's tokens in which neighbours in space and time share a block.

A clip is a grid of tokens, ``(frames, height, width)``, which diffusers lists in raster order: frame by frame, row by
row. A block of 128 consecutive tokens is then a strip of two or three rows of one frame. Both orders here cut compact
boxes instead, whose tokens resemble each other more (SpargeAttn, section 3.7 and table 4): their mean stands for them
better, and fewer tiles carry the mass of a row. How far blocks spread is given below as the mean squared distance of
their tokens from their centres, for a grid of 21 × 30 × 52 and blocks of 128; in raster order it is 234.

An order is a permutation, int64 ``[S]``: the token at place i is the one that raster order has at place ``order[i]``.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from dit_accel.errors import ShapeError

Grid = tuple[int, int, int]  # tokens along frames, height and width

TOKEN_ORDERS = ("raster", "hilbert", "tiles")


@lru_cache(maxsize=16)
def token_order(name: str, grid: Grid, block: int, *, first_frame_apart: bool = False) -> torch.Tensor:
    """The order of that name; computed once, so the tensor must not be written to.

    Args:
        name: one of ``TOKEN_ORDERS``.
        grid: tokens along frames, height and width.
        block: tokens in a block, to which ``tiles`` are cut.
        first_frame_apart: the first frame's tokens stay first, in an order of their own, for models that tell them by
            their place.

    Raises:
        ShapeError: unknown name, or an axis without tokens.
    """
    if name not in TOKEN_ORDERS:
        raise ShapeError(f"token order must be one of {TOKEN_ORDERS}, got {name!r}")
    if min(grid) < 1:
        raise ShapeError(f"grid must have at least one token along each axis, got {grid}")
    frames, height, width = grid
    if first_frame_apart and frames > 1:
        first = token_order(name, (1, height, width), block)
        rest = token_order(name, (frames - 1, height, width), block)
        return torch.cat([first, rest + height * width])
    if name == "raster":
        return torch.arange(frames * height * width)
    return hilbert_order(grid) if name == "hilbert" else tiles_order(grid, block)


def inverse_order(order: torch.Tensor) -> torch.Tensor:
    """The order that undoes one: ``x[order][inverse_order(order)]`` is ``x``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def hilbert_order(grid: Grid) -> torch.Tensor:
    """Along a Hilbert curve, of the axes that have more than one token. Blocks spread by 8.9.

    Sides are stretched to the next power of two, which the curve needs. Leaving out what lies beyond the grid instead
    would keep the curve tighter on the whole, but lets it leave the grid and come back far away: the worst block then
    spreads by 40, here by 16.
    """
    axes = [places * (1 << _bits(side)) // side for places, side in zip(_places(grid), grid, strict=True) if side > 1]
    if not axes:
        return torch.zeros(1, dtype=torch.int64)
    return hilbert_index(axes, max(_bits(side) for side in grid)).argsort(stable=True)


def tiles_order(grid: Grid, block: int) -> torch.Tensor:
    """Boxes of about ``block`` tokens, as near to cubes as the grid allows. Blocks spread by 6.6.

    Frames are cut into slabs and rows into bands, each into even parts, and every band is listed column by column. So
    any run of ``block`` tokens is a box of the band, wherever it begins, and no ragged boxes shift those behind them.
    Every other band is listed backwards, and every other slab too: blocks that hold a seam stay in one piece.
    """
    frame, row, column = _places(grid)
    frames, height, width = grid
    slabs = max(1, round(frames / block ** (1 / 3)))
    bands = max(1, round(height / (block * slabs / frames) ** 0.5))
    slab, band = frame * slabs // frames, row * bands // height
    strip = slab * bands + torch.where(slab % 2 == 0, band, bands - 1 - band)
    along = torch.where(strip % 2 == 0, column, width - 1 - column)
    return (((strip * width + along) * frames + frame) * height + row).argsort()


def hilbert_index(axes: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Places of points along the Hilbert curve of a cube (Skilling, "Programming the Hilbert curve", 2004).

    Args:
        axes: coordinates, an int64 ``[S]`` an axis, from 0 to ``2 ** bits - 1``.

    Returns:
        int64 ``[S]``, from 0 to ``2 ** (bits · axes) - 1``; consecutive places are neighbours in the cube.
    """
    axes = list(axes)
    for bit in range(bits - 1, 0, -1):  # turn each cell of the level so that its own curve joins its neighbours'
        below = (1 << bit) - 1
        for i, axis in enumerate(axes):
            is_far = (axis >> bit) & 1 == 1
            exchanged = torch.where(is_far, 0, (axes[0] ^ axis) & below)
            axes[i] = axis ^ exchanged
            axes[0] = axes[0] ^ torch.where(is_far, below, exchanged)
    for i in range(1, len(axes)):  # Gray code across axes
        axes[i] = axes[i] ^ axes[i - 1]
    flips = torch.zeros_like(axes[0])
    for bit in range(bits - 1, 0, -1):
        flips = flips ^ ((axes[-1] >> bit) & 1) * ((1 << bit) - 1)
    index = torch.zeros_like(flips)
    for bit in range(bits - 1, -1, -1):
        for axis in axes:
            index = index << 1 | ((axis ^ flips) >> bit) & 1
    return index


def _places(grid: Grid) -> tuple[torch.Tensor, ...]:
    """Frame, row and column of each token in raster order, int64 ``[S]`` each."""
    return torch.cartesian_prod(*(torch.arange(side) for side in grid)).unbind(1)


def _bits(side: int) -> int:
    return (side - 1).bit_length()
