"""A CUDA graph for the CPU: it replays by calling the function again, and copies what comes into the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch.utils import _pytree as pytree

from dit_accel.models.cuda_graph import Trial


class FakeGraph:
    """Captures on any device, and counts; what it captured holds NaN until it is replayed."""

    captures = replays = 0
    refuses: Exception | None = None
    trial = Trial(None, lambda: 0.9, lambda: 1.0)  # what every call that is watched comes to

    def __init__(self, device, pool):
        self.pool = pool

    @staticmethod
    def why_not(device):
        return None

    @staticmethod
    def new_pool():
        return object()

    @classmethod
    def watch(cls, function, device):
        return function(), cls.trial

    def capture(self, function):
        if self.refuses is not None:
            raise self.refuses
        type(self).captures += 1
        self._function, self._made = function, function()
        for tensor in tensors_in(self._made):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        return self._made

    def replay(self):
        type(self).replays += 1
        for static, fresh in zip(tensors_in(self._made), tensors_in(self._function()), strict=True):
            static.copy_(fresh)


def tensors_in(tree) -> Iterator[torch.Tensor]:
    """All tensors of nested containers and dataclasses."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
