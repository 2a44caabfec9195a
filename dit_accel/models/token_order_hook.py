"""Video transformers, whose tokens may run through the blocks in another order than they come in.

The order is put on where tokens enter the first block, with their RoPE tables (and, where each token has its own, their
timesteps), and taken off where they leave the last one. Blocks see nothing of it and no layer pays for it.

Projections at either end are left alone, for LoRA replaces them and would work beside a hook of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.kept import Kept
from dit_accel.models.families.family import OrderFacts
from dit_accel.models.hooks import Hook, parameter_names
from dit_accel.sparse.token_order import Grid, inverse_order, token_order

MOST_ORDERS = 4  # two grids, each with its way back
Reorder = Callable[[torch.Tensor, int, bool], torch.Tensor]  # tokens, their axis, and whether the order is taken off


class TokenOrder:
    """The preset's order of tokens, on any grid.

    Args:
        name: one of ``dit_accel.sparse.token_order.TOKEN_ORDERS``.
        block: tokens in a block.
        first_frame_apart: whether the first frame's tokens stay first.
    """

    def __init__(self, name: str, block: int, first_frame_apart: bool) -> None:
        self._name = name
        self._block = block
        self._first_frame_apart = first_frame_apart
        self._on_device: Kept[torch.Tensor] = Kept(MOST_ORDERS)  # by grid, device and `undo`

    def of(self, grid: Grid) -> torch.Tensor:
        """The order of a clip on that grid, int64 ``[S]``; see :mod:`dit_accel.sparse.token_order`."""
        return token_order(self._name, grid, self._block, first_frame_apart=self._first_frame_apart)

    def apply(self, x: torch.Tensor, grid: Grid, axis: int, *, undo: bool = False) -> torch.Tensor:
        """``x`` with its tokens, along ``axis``, brought into this order or back from it.

        Raises:
            UnsupportedError: there are not as many tokens as in the clip.
        """
        order = self._on_device.get(
            (grid, x.device, undo), lambda: (inverse_order(self.of(grid)) if undo else self.of(grid)).to(x.device)
        )
        if x.shape[axis] != len(order):
            raise UnsupportedError(
                f"blocks.token_order {self._name!r} needs all {len(order)} tokens of the clip in one place, got "
                f"{x.shape[axis]} (context parallelism?): set blocks.token_order to raster"
            )
        return x.index_select(axis, order)


class ReorderInput(Hook):
    """Reorders the tokens ``[B, S, C]`` that a module takes as its first argument, or takes their order off."""

    def __init__(self, reorder: Reorder, *, undo: bool = False) -> None:
        super().__init__()
        self._reorder = reorder
        self._undo = undo

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        args, kwargs = super().pre_forward(module, *args, **kwargs)
        tokens, *others = args or (kwargs.pop(parameter_names(module)[0]),)
        return (self._reorder(tokens, 1, self._undo), *others), kwargs


class ReorderOutput(Hook):
    """Reorders what a module gives for each token.

    Args:
        axes: the axis of tokens in some parts of the module's output, by the part's index. Features come behind it; in
            a call where they do not, the part is one for all tokens.
    """

    def __init__(self, reorder: Reorder, axes: Mapping[int, int]) -> None:
        super().__init__()
        self._reorder = reorder
        self._axes = axes

    def post_forward(self, module: nn.Module, output: tuple) -> tuple:
        parts = list(output)
        for part, axis in self._axes.items():
            if parts[part].ndim > axis + 1:
                parts[part] = self._reorder(parts[part], axis, False)
        return tuple(parts)


def order_hooks(
    reorder: Reorder, transformer: nn.Module, facts: OrderFacts, first_block: nn.Module
) -> Iterator[tuple[nn.Module, Hook]]:
    """Hooks where the family's facts say that the order goes on and off, and the modules they go to."""
    for name, axes in facts.tables.items():
        yield transformer.get_submodule(name), ReorderOutput(reorder, axes)
    yield first_block, ReorderInput(reorder)
    yield transformer.get_submodule(facts.exit), ReorderInput(reorder, undo=True)
