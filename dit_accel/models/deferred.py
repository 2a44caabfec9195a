"""Calls that wait until somebody reads what they give, which may be never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class TensorForm:
    """All of a tensor but its values and strides."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(tensor.shape, tensor.dtype, tensor.device)


class DeferredCall:
    """A call that is made when one of its tensors is first read, and then once.

    Args:
        run: makes it.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run: Callable[[], Any] | None = run
        self._leaves: list[Any] = []

    def leaf(self, index: int) -> torch.Tensor:
        """One leaf of the output, counted as PyTorch's pytree does."""
        if self._run is not None:
            with torch.no_grad():  # as where it was deferred
                self._leaves, self._run = pytree.tree_leaves(self._run()), None
        return self._leaves[index]


class DeferredTensor(torch.Tensor):
    """Stands for a tensor of a deferred call; every operation on it makes the call.

    Args:
        call: whose output it is part of.
        index: among the leaves of the output.
        form: that it will have.
    """

    @staticmethod
    def __new__(cls, call: DeferredCall, index: int, form: TensorForm) -> DeferredTensor:
        return torch.Tensor._make_wrapper_subclass(cls, form.shape, dtype=form.dtype, device=form.device)

    def __init__(self, call: DeferredCall, index: int, form: TensorForm) -> None:
        self._call, self._index = call, index

    def computed(self) -> torch.Tensor:
        return self._call.leaf(self._index)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        args, kwargs = computed((args, kwargs or {}))
        return op(*args, **kwargs)


def computed(tree: Any) -> Any:
    """Nested arguments with the tensors themselves in the place of deferred ones."""
    return pytree.tree_map_only(DeferredTensor, DeferredTensor.computed, tree)
