"""Collectives in a call that is captured as CUDA graphs: they run between the graphs.

A process group can't be destroyed while a graph holds its operations
(https://github.com/pytorch/pytorch/issues/115388), a graph's operations have no timeout, and captured collectives of
one rank would not match eager ones of another. So a capture is cut at each collective. A rank then sends the same data
in the same order whether it replays or not, and ranks need not agree to capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dit_accel.errors import UnsupportedError

OPERATIONS = torch.ops._c10d_functional  # functional collectives, including those that diffusers calls
NAMESPACES = ("_c10d_functional", "c10d_functional", "c10d")
OF_ONE = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")  # these send nothing


@dataclass(frozen=True)
class Collective:
    """One collective of a capture, and the static tensors that it reads and writes."""

    operation: Any
    arguments: tuple
    output: Any

    def unowned(self) -> Collective:
        """Return a copy that does not own its tensors, so that a capture can reuse their memory."""
        return Collective(self.operation, *pytree.tree_map_only(torch.Tensor, alias, (self.arguments, self.output)))

    def run(self) -> None:
        if self.operation is OPERATIONS.all_to_all_single.default:
            sent, counts_received, counts_sent, group = self.arguments
            group = _resolve_process_group(group) if isinstance(group, str) else group
            dist.all_to_all_single(self.output, sent, counts_received, counts_sent, group=group)
            return
        result = self.operation(*self.arguments)
        for static, fresh in zip(pytree.tree_leaves(self.output), pytree.tree_leaves(result), strict=True):
            static.copy_(functional.wait_tensor(fresh))


class CutAtCollectives(TorchDispatchMode):
    """Context in which collectives are passed to ``cut`` instead of run; their outputs are uninitialised."""

    def __init__(self, cut: Callable[[Collective], None]) -> None:
        super().__init__()
        self._cut = cut

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace not in NAMESPACES:
            return function(*args, **(kwargs or {}))
        args = pytree.tree_map_only(functional.AsyncCollectiveTensor, lambda received: received.wait(), args)
        if function._schema.name in OF_ONE:
            return args[0]
        if function.namespace != "_c10d_functional" or function._schema.is_mutable or kwargs:
            raise UnsupportedError(f"{function} can't be kept out of a CUDA graph; functional collectives can")
        (device,) = {leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        forms = function(*pytree.tree_map_only(torch.Tensor, lambda sent: sent.to("meta"), args))
        output = pytree.tree_map_only(torch.Tensor, lambda form: torch.empty_like(form, device=device), forms)
        self._cut(Collective(function, args, output))
        return output


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same GPU memory that does not own it."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    form = {"version": 3, "typestr": "|u1", "shape": (storage.nbytes(),), "data": (storage.data_ptr(), False)}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=form), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
