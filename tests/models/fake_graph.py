"""CUDA graphs for the CPU: they record operations, and their memory behaves as badly as a GPU's may."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dit_accel.kernels import custom_ops
from dit_accel.models.free_memory import GIB, FreeMemory
from dit_accel.models.graphs.cuda_graph import CaptureTrial, CudaGraph


class Pool:
    """Memory that graphs share."""

    def __init__(self):
        self.is_used = False
        self.graphs = weakref.WeakSet()


class RecordedGraph(CudaGraph):
    """Records operations, a kernel as one, is cut as on a GPU, and counts.

    A capture computes nothing: all that it makes holds NaN or 0 until it is replayed. A replay overwrites whatever
    other graphs of its pool have made. A pool whose graphs are gone can't be captured into.
    """

    captures = replays = parts = 0
    refuses: Exception | None = None  # raised where a capture begins
    fails: Exception | None = None  # raised at its end
    trial = CaptureTrial(None, lambda: 0.9, lambda: 1.0, peak=GIB)  # result of every watched call
    free = 100 * GIB

    def __init_subclass__(cls):
        cls.captures = cls.replays = cls.parts = 0

    def __init__(self, device, pool):
        super().__init__(device, pool)
        self.recorders = []

    @staticmethod
    def why_not(device):
        return None

    @staticmethod
    def new_pool():
        return Pool()

    @classmethod
    def memory(cls, device):
        return FreeMemory(cls.free, 100 * GIB)

    @classmethod
    def watch(cls, function, device):
        return function(), cls.trial

    def capture(self, function):
        if self.refuses is not None:
            raise self.refuses
        if self._pool.is_used and not self._pool.graphs:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._pool.is_used = True
        self._pool.graphs.add(self)
        type(self).captures += 1
        output = super().capture(function)
        if self.fails is not None:
            raise self.fails
        return output

    def _aside(self):
        return nullcontext()

    def _begin(self):
        self._capturing = Recorder()
        self.recorders.append(self._capturing)
        self._capturing.__enter__()
        self._parts.append(self._capturing.replay)
        type(self).parts += 1

    def _end(self):
        self._capturing.__exit__(None, None, None)

    def replay(self):
        type(self).replays += 1
        for other in self._pool.graphs:
            for recorder in other.recorders if other is not self else ():
                recorder.overwrite()
        super().replay()


def tensors_in(tree) -> Iterator[torch.Tensor]:
    """All tensors of nested containers and dataclasses."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


class TracedTorch:
    """Has ``custom_ops`` call kernels by their names, as where a compiler traces: the reference of one may read values
    on the host, which its kernel does on the GPU.
    """

    compiler = SimpleNamespace(is_compiling=lambda: True, disable=lambda function: function)

    def __getattr__(self, name):
        return getattr(torch, name)


class Recorder(TorchDispatchMode):
    """Operations with the tensors that they read and write, to run again with the tensors' current content."""

    def __init__(self):
        super().__init__()
        self._tracing = patch.object(custom_ops, "torch", TracedTorch())
        self._done = []
        self.outputs = {}  # tensors by their storage

    def __enter__(self):
        self._tracing.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._tracing.stop()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        read = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs])}
        fresh = [tensor.untyped_storage()._cdata not in read for tensor in tensors_in(output)]
        if any(fresh) or function._schema.is_mutable:
            self._done.append((function, args, kwargs or {}, output))
            for tensor, is_fresh in zip(tensors_in(output), fresh, strict=True):
                if is_fresh:
                    self.outputs[tensor.untyped_storage()._cdata] = tensor
                    overwrite(tensor)  # whatever is computed of it now is nothing
        return output

    def replay(self):
        for function, args, kwargs, output in self._done:
            for static, fresh in zip(tensors_in(output), tensors_in(function(*args, **kwargs)), strict=True):
                if static is not fresh:
                    static.copy_(fresh)

    def overwrite(self):
        for tensor in self.outputs.values():
            overwrite(tensor)


def overwrite(tensor: torch.Tensor) -> None:
    with torch.inference_mode():  # under which it may have been made
        tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
