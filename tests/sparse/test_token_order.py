"""Token orders: permutations in which neighbours in space and time share a block."""

import pytest
import torch

from dit_accel.errors import ShapeError
from dit_accel.sparse.token_order import TOKEN_ORDERS, hilbert_index, hilbert_order, token_order
from tests.pairs import every_pair

FULL_SIZE = [(21, 30, 52), (33, 45, 80)]  # 81 frames of 480p, 129 of 720p
GRIDS = [(1, 1, 1), (1, 1, 7), (1, 5, 1), (2, 1, 3), (1, 6, 9), (3, 6, 8), (5, 16, 16), (4, 7, 11), FULL_SIZE[0]]
every_full_size = pytest.mark.parametrize("grid", FULL_SIZE, ids=["480p", "720p"])


def places(grid: tuple[int, int, int], order: torch.Tensor) -> torch.Tensor:
    """Frame, row and column of each token in that order, float64 ``[S, 3]``, from the definition of raster order."""
    _, height, width = grid
    return torch.stack([order // (height * width), order // width % height, order % width], dim=1).double()


def steps(grid: tuple[int, int, int], order: torch.Tensor) -> torch.Tensor:
    """Distance of each token from the one before it."""
    return places(grid, order).diff(dim=0).norm(dim=1)


def whole_blocks(grid: tuple[int, int, int], order: torch.Tensor, block: int) -> torch.Tensor:
    """Places ``[T, block, 3]`` of the tokens of every block but a ragged last one."""
    return places(grid, order)[: len(order) // block * block].unflatten(0, (-1, block))


def spreads(blocks: torch.Tensor) -> torch.Tensor:
    """Mean squared distance of each block's tokens from their centre."""
    return (blocks - blocks.mean(1, keepdim=True)).square().sum(2).mean(1)


@every_pair(name=TOKEN_ORDERS, block=(64, 128), grid=GRIDS, first_frame_apart=(False, True))
def test_every_token_comes_once(name, block, grid, first_frame_apart):
    """The first frame's tokens stay first if they are to be apart."""
    order = token_order(name, grid, block, first_frame_apart=first_frame_apart)
    raster = torch.arange(torch.tensor(grid).prod())
    assert torch.equal(order.sort().values, raster) and torch.equal(order[order.argsort()], raster)
    if name == "raster":
        assert torch.equal(order, raster)
    if first_frame_apart and grid[0] > 1:
        first, rest = (token_order(name, (frames, *grid[1:]), block) for frames in (1, grid[0] - 1))
        assert torch.equal(order, torch.cat([first, rest + len(first)]))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_hilbert_curve_goes_from_neighbour_to_neighbour(dimensions):
    """In a cube the curve visits every cell, each a neighbour of the one before, and fills each half-cube in one go."""
    bits = 3
    cells = torch.cartesian_prod(*[torch.arange(1 << bits)] * dimensions).view(-1, dimensions)
    index = hilbert_index(list(cells.unbind(1)), bits)
    assert torch.equal(index.sort().values, torch.arange(len(cells)))
    curve = cells[index.argsort()]
    assert (curve.diff(dim=0).abs().sum(1) == 1).all()
    corners = (curve // 4).unflatten(0, (2**dimensions, -1))
    assert (corners == corners[:, :1]).all()


@every_full_size
def test_hilbert_order_never_leaps(grid):
    """On sides that are no powers of two consecutive tokens are neighbours, or next but one."""
    distances = steps(grid, hilbert_order(grid))
    assert distances.mean() < 1.15 and distances.max() <= 3
    assert steps(grid, token_order("raster", grid, 128)).max() > 50


@every_full_size
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("name, mean, worst", [("hilbert", 1.6, 4.0), ("tiles", 1.15, 2.2)])
def test_blocks_are_compact(name, mean, worst, grid, block):
    """A block spreads little more than a cube of its size would, the worst one too; a raster block many times that."""
    cube = 0.25 * block ** (2 / 3)  # three axes of s²/12
    spread = spreads(whole_blocks(grid, token_order(name, grid, block), block)) / cube
    assert spread.mean() < mean and spread.max() < worst
    assert spreads(whole_blocks(grid, token_order("raster", grid, block), block)).mean() > 20 * cube


@pytest.mark.parametrize(
    "name, grid, complaint",
    [("snake", (3, 4, 5), "must be one of .*'tiles'.*got 'snake'"), ("tiles", (3, 0, 5), "at least one token")],
    ids=["name", "empty"],
)
def test_bad_orders_are_refused(name, grid, complaint):
    with pytest.raises(ShapeError, match=complaint):
        token_order(name, grid, 128)
