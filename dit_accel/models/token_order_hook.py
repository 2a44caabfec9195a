"""Token order of video transformers: hooks that reorder tokens before the blocks and restore them after.

Tokens are reordered where they enter the first block, together with RoPE tables and with timesteps if each token has
its own. They are restored where they leave the last block. Blocks do not notice, and no layer pays for it.

Projections at either end have no hooks, because LoRA replaces these modules and would bypass a hook.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.kept import Kept
from dit_accel.models.hooks import Hook, parameter_names
from dit_accel.sparse.token_order import Grid, token_order

MOST_ORDERS = 4  # two grids, each with its inverse
Reorder = Callable[[torch.Tensor, int, bool], torch.Tensor]  # takes tokens, their axis, and True to restore


class TokenOrder:
    """The preset's order of tokens, on any grid; with ``first_frame_apart`` the first frame's tokens stay first."""

    def __init__(self, name: str, block: int, first_frame_apart: bool) -> None:
        self._name = name
        self._block = block
        self._first_frame_apart = first_frame_apart
        self._on_device: Kept[torch.Tensor] = Kept(MOST_ORDERS)  # by grid, device and `undo`

    def of(self, grid: Grid) -> torch.Tensor:
        """Return the order of a video with that grid, int64 ``[S]``; see :mod:`dit_accel.sparse.token_order`."""
        return token_order(self._name, grid, self._block, first_frame_apart=self._first_frame_apart)

    def apply(self, x: torch.Tensor, grid: Grid | None, axis: int, undo: bool = False) -> torch.Tensor:
        """Bring all tokens of the video, along ``axis`` of ``x``, into this order, or restore raster order."""
        if grid is None:
            return x
        key = grid, x.device, undo
        order = self._on_device.get(key, lambda: (self.of(grid).argsort() if undo else self.of(grid)).to(x.device))
        if x.shape[axis] != len(order):
            needs = f"all {len(order)} tokens of the video on one device, got {x.shape[axis]} (context parallelism?)"
            raise UnsupportedError(f"blocks.token_order {self._name!r} needs {needs}: set it to raster")
        return x.index_select(axis, order)


class ReorderInput(Hook):
    """Reorders or restores the tokens ``[B, S, C]`` in a module's first argument."""

    def __init__(self, reorder: Reorder, *, undo: bool = False) -> None:
        super().__init__()
        self._reorder = reorder
        self._undo = undo

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        args, kwargs = super().pre_forward(module, *args, **kwargs)
        tokens, *others = args or (kwargs.pop(parameter_names(module)[0]),)
        return (self._reorder(tokens, 1, self._undo), *others), kwargs


class ReorderOutput(Hook):
    """Reorders the entries for each token in parts of a module's output; ``axes`` of tokens are by the part's index."""

    def __init__(self, reorder: Reorder, axes: Mapping[int, int]) -> None:
        super().__init__()
        self._reorder = reorder
        self._axes = axes

    def post_forward(self, module: nn.Module, output: tuple) -> tuple:
        parts = list(output)
        for part, axis in self._axes.items():
            if parts[part].ndim > axis + 1:  # features follow, otherwise the part is shared by all tokens
                parts[part] = self._reorder(parts[part], axis, False)
        return tuple(parts)
