"""CUDA graphs for the CPU, which copy what comes into the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dit_accel.models.cuda_graph import CudaGraph, Trial


class FakeGraph:
    """Captures on any device, replays by calling the function again, and counts.

    What it captured holds NaN until it is replayed.
    """

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


class RecordedGraph(CudaGraph):
    """Records torch's operations, those of kernels apart, and is cut as on a GPU."""

    parts = replays = 0
    why_not, new_pool, watch = FakeGraph.why_not, FakeGraph.new_pool, FakeGraph.watch
    trial = FakeGraph.trial

    def _aside(self):
        return nullcontext()

    def _begin(self):
        self._capturing = Recorder()
        self._capturing.__enter__()
        self._parts.append(self._capturing.replay)
        type(self).parts += 1

    def _end(self):
        self._capturing.__exit__(None, None, None)

    def replay(self):
        type(self).replays += 1
        super().replay()


class Recorder(TorchDispatchMode):
    """Operations and the tensors that they read and write, to be run again on what these hold."""

    def __init__(self):
        super().__init__()
        self._done = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        read = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs])}
        fresh = [tensor.untyped_storage()._cdata not in read for tensor in tensors_in(made)]
        if any(fresh) or function._schema.is_mutable:
            self._done.append((function, args, kwargs or {}, made))
            for tensor, is_fresh in zip(tensors_in(made), fresh, strict=True):
                if is_fresh and tensor.is_floating_point():
                    tensor.fill_(torch.nan)  # whatever is computed of it now is nothing
        return made

    def replay(self):
        for function, args, kwargs, made in self._done:
            for static, fresh in zip(tensors_in(made), tensors_in(function(*args, **kwargs)), strict=True):
                if static is not fresh:
                    static.copy_(fresh)
