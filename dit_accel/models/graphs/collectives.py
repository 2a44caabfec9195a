"""What processes send each other in a call that is captured as CUDA graphs: it stays between one graph and the next.

A process group can't be destroyed while a graph lives that holds operations of it
(https://github.com/pytorch/pytorch/issues/115388), a graph's operations have no timeout, and ranks of which one replays
and another runs as ever would not meet. So a capture is cut at each collective. A rank sends the same in the same order
whether it replays or not, and needs nobody's consent to capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dit_accel.errors import UnsupportedError

OPERATIONS = torch.ops._c10d_functional  # what functional collectives come to, those of diffusers too
NAMESPACES = ("_c10d_functional", "c10d_functional", "c10d")
OF_ONE = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")  # which send nothing


@dataclass(frozen=True)
class Collective:
    """One collective, and the tensors that it reads and writes, where a capture has put them.

    Args:
        operation: of :data:`OPERATIONS`.
        arguments: as it takes them.
        output: as it nests its tensors.
    """

    operation: Any
    arguments: tuple
    output: Any

    def unowned(self) -> Collective:
        """The same, which does not keep its tensors: in a capture many have a place, one after the other."""
        return Collective(self.operation, *pytree.tree_map_only(torch.Tensor, alias, (self.arguments, self.output)))

    def run(self) -> None:
        """Sends, receives and fills the output."""
        if self.operation is OPERATIONS.all_to_all_single.default:
            sent, counts_received, counts_sent, group = self.arguments
            group = _resolve_process_group(group) if isinstance(group, str) else group
            dist.all_to_all_single(self.output, sent, counts_received, counts_sent, group=group)
            return
        made = self.operation(*self.arguments)
        for static, fresh in zip(pytree.tree_leaves(self.output), pytree.tree_leaves(made), strict=True):
            static.copy_(functional.wait_tensor(fresh))


class CutAtCollectives(TorchDispatchMode):
    """Within, collectives are not run but handed on, and the tensors that they give hold anything.

    Args:
        cut: takes each.
    """

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
            raise UnsupportedError(f"{function} can't be taken out of what is captured; functional collectives can")
        (device,) = {leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        forms = function(*pytree.tree_map_only(torch.Tensor, lambda sent: sent.to("meta"), args))
        output = pytree.tree_map_only(torch.Tensor, lambda form: torch.empty_like(form, device=device), forms)
        self._cut(Collective(function, args, output))
        return output


class _Memory:
    """Memory of a GPU as NumPy's array interface for CUDA tells it, which owns nothing."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (storage.nbytes(),),
            "data": (storage.data_ptr(), False),
        }


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A GPU's tensor at the same place, which does not keep it."""
    if tensor.device.type != "cuda":
        return tensor
    memory = torch.as_tensor(_Memory(tensor.untyped_storage()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
