"""VSA's policy: attention between cubes of tokens chooses the tiles, and is added to attention inside them.

A video's tokens are cut into cubes of 4 × 4 × 4, smaller at the ends, with one mean of queries, keys and values each
(Zhang et al. 2025, "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 3):

    P = softmax(q_mean k_mean^T / sqrt(D))      O = gate * (P v_mean) + attention over the largest tiles of P

``gate`` is a learned projection of the attention's input. A cube is a block of 64 places, the last ones masked zeros.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.kept import Kept
from dit_accel.kernels.layout import Grid, TokenLayout
from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.plans.pooling import PooledMap
from dit_accel.kernels.plans.selection import select_tiles
from dit_accel.kernels.symbols import FIRST_PARTIAL_TILE, FULL_TILE, SparseSymbols, TileMasks
from dit_accel.presets.skip import VsaSkip
from dit_accel.sparse.inputs import Inputs, Projection
from dit_accel.sparse.policies.policy import Policy, every_row

SIDE = 4  # tokens along each axis of a cube
PLACES = SIDE**3


class Cubes(NamedTuple):
    """Places of a video's tokens in T cubes."""

    places: torch.Tensor  # int64 [S], by token in raster order; place // PLACES is its cube
    sizes: torch.Tensor  # int64 [T], tokens
    masks: TileMasks  # hide the places of no token

    def filled(self, x: torch.Tensor) -> torch.Tensor:
        """Bring tokens ``[B, S, H, D]`` to their places ``[B, 64 * T, H, D]``; places of no token are 0."""
        batch, _, *features = x.shape
        return x.new_zeros(batch, PLACES * len(self.sizes), *features).index_copy_(1, self.places, x)

    def means(self, filled: torch.Tensor) -> torch.Tensor:
        """Return the mean of each cube's tokens, float32 ``[B, H, T, D]``."""
        sums = filled.unflatten(1, (-1, PLACES)).sum(2, dtype=torch.float32)
        return (sums / self.sizes[:, None, None]).transpose(1, 2)


_CUBES: Kept[Cubes] = Kept(8)  # a pipeline has one or two grids


def cubes_of(grid: Grid | None, device: torch.device) -> Cubes:
    """Return the cubes of a video with that grid; places of a cube follow raster order."""
    if grid is None:
        raise UnsupportedError("policy 'vsa' cuts a video into cubes, and the layout has no grid of one")

    def cut() -> Cubes:
        places = [torch.arange(side, device=device) // SIDE for side in grid]
        frame, row, column = torch.meshgrid(*places, indexing="ij")
        _, rows, columns = (-(-side // SIDE) for side in grid)
        cube = ((frame * rows + row) * columns + column).flatten()
        sizes = cube.bincount()
        rank = cube.argsort(stable=True).argsort() - (sizes.cumsum(0) - sizes)[cube]  # of a token in its cube
        kinds, kind = sizes.unique(return_inverse=True)  # a mask for each size; that of whole cubes is not read
        codes = torch.where(sizes == PLACES, FULL_TILE, FIRST_PARTIAL_TILE + kind).int().expand(len(sizes), -1)
        keys = torch.arange(PLACES, device=device) < kinds[:, None, None]
        pool = pack_bits(keys.expand(-1, PLACES, -1).contiguous())
        return Cubes(cube * PLACES + rank, sizes, TileMasks(codes[None, None], pool))

    return _CUBES.get((grid, device), cut)


class Vsa(Policy):
    """Select whole tiles of cubes; every row computes, of a video without text."""

    needs_grid = True
    projects_heads = True

    def attend(
        self, attend: Callable[[Inputs], torch.Tensor], inputs: Inputs, projection: Projection | None
    ) -> torch.Tensor:
        """Attend inside cubes, and add attention between cubes; without a learned gate the gate is 0."""
        cubes = cubes_of(inputs.layout.grid, inputs.q.device)
        q, k, v = map(cubes.filled, inputs[:3])
        q_mean, k_mean, v_mean = map(cubes.means, (q, k, v))
        probabilities = (q_mean @ k_mean.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        layout = TokenLayout(0, q.shape[1], PLACES, grid=inputs.layout.grid)
        alike = probabilities.new_ones(probabilities.shape[:3])  # VSA does not measure it
        o = attend(inputs._replace(q=q, k=k, v=v, layout=layout, pooled=PooledMap(probabilities, alike, alike)))
        o = o.index_select(1, cubes.places)
        if projection is None:
            return o
        gate = functional.linear(inputs.x, *projection).view_as(o)
        between = (probabilities @ v_mean).transpose(1, 2).to(o.dtype)  # [B, T, H, D]
        return o.addcmul_(gate, between.index_select(1, cubes.places // PLACES))

    def draw(self, inputs: Inputs, config: VsaSkip) -> SparseSymbols:
        """Return the tiles of highest probability between cubes, in which :meth:`attend` brought the tokens."""
        skip_bits = select_tiles(inputs.scored().probabilities, None, top_k=1 - config.sparsity)
        masks = cubes_of(inputs.layout.grid, inputs.q.device).masks
        return every_row(inputs.q, inputs.layout, skip_bits, masks=masks)
