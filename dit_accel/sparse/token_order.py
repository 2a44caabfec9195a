"""Orders of a video's tokens in which neighbours in space and time share a block.

A video is a grid of tokens, ``(frames, height, width)``, which diffusers lists in raster order: frame by frame, row by
row. A block of 128 consecutive tokens is then a strip of two or three rows of one frame. The two other orders cut
compact boxes instead. The tokens of a box are more similar (SpargeAttn, section 3.7 and table 4), so their mean
represents them better, and fewer tiles carry the mass of a row. The *spread* of blocks below is the mean squared
distance of tokens from their block's centre, for a grid of 21 × 30 × 52 and blocks of 128; in raster order it is 234.

An order is a permutation, int64 ``[S]``: place i of the order has the token at place ``order[i]`` of raster order. Its
``argsort`` is the inverse permutation.
"""

from functools import lru_cache

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.layout import Grid

TOKEN_ORDERS = ("raster", "hilbert", "tiles")


@lru_cache(maxsize=16)
def token_order(name: str, grid: Grid, block: int, *, first_frame_apart: bool = False) -> torch.Tensor:
    """Return the order of that name. The tensor is cached, so do not write to it.

    ``block`` is the size of the boxes of ``tiles``. With ``first_frame_apart`` the first frame's tokens stay first, in
    an order of their own, for models that find them by their place.

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
        return torch.cat([first, token_order(name, (frames - 1, height, width), block) + height * width])
    if name == "raster":
        return torch.arange(frames * height * width)
    return hilbert_order(grid) if name == "hilbert" else tiles_order(grid, block)


def hilbert_order(grid: Grid) -> torch.Tensor:
    """Return the order along a Hilbert curve over the axes that have more than one token. Its spread is 8.9.

    Sides are stretched to the next power of two, which the curve needs. Dropping the points outside of the grid instead
    makes the curve tighter on average, but it leaves the grid and returns far away: a block spreads by 40, not by 16.
    """
    axes = [places * (1 << _bits(side)) // side for places, side in zip(_places(grid), grid, strict=True) if side > 1]
    if not axes:
        return torch.zeros(1, dtype=torch.int64)
    return hilbert_index(axes, max(_bits(side) for side in grid)).argsort(stable=True)


def tiles_order(grid: Grid, block: int) -> torch.Tensor:
    """Return the order of boxes of about ``block`` tokens, as near to cubes as the grid allows. Its spread is 6.6.

    Frames are cut into equal slabs and rows into equal bands, and every band is listed column by column. So any
    ``block`` consecutive tokens are a box of the band, and no ragged box shifts the following ones. Every second band
    and every second slab is listed backwards, so a block that crosses a seam stays connected.
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
    """Return the places of points along a cube's Hilbert curve (Skilling, "Programming the Hilbert curve", 2004).

    Coordinates, an int64 ``[S]`` an axis, are below ``2 ** bits``; consecutive places are neighbours in the cube.
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
    """Return frame, row and column of each token in raster order, int64 ``[S]`` each."""
    return torch.cartesian_prod(*(torch.arange(side) for side in grid)).unbind(1)


def _bits(side: int) -> int:
    return (side - 1).bit_length()
