"""Deferred ControlNet calls: a ControlNet runs only in steps whose transformer reads its output.

A pipeline calls its ControlNet in every step. A step forecast at level ``output`` runs no block and reads no output of
the net, so a call waits until something reads one of its tensors. At every level the ControlNet's image and strength
count as conditions of the transformer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_accel.models.hooks import HOOK_NAME, Hook, find_hook, is_compiled, parameter_names, register_hook, remove_hook

NUMBERS = (bool, int, float)
CONTROL_NET = "controlnet"  # component of a pipeline: one net, or several in one
SLICES = (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default)  # a part, and a part that is the whole


@dataclass(frozen=True)
class TensorForm:
    """Shape, dtype and all else of a tensor except its values and strides."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(tensor.shape, tensor.dtype, tensor.device)


class DeferredCall:
    """A call that runs once, when one of its tensors is first read."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run: Callable[[], Any] | None = run
        self._leaves: list[Any] = []

    def leaf(self, index: int) -> torch.Tensor:
        """Return one leaf of the output, in the order of PyTorch's pytree."""
        if self._run is not None:
            with torch.no_grad():  # as where it was deferred
                self._leaves, self._run = pytree.tree_leaves(self._run()), None
        return self._leaves[index]


class DeferredTensor(torch.Tensor):
    """Placeholder of a deferred call's tensor; every operation on it runs the call."""

    @staticmethod
    def __new__(cls, call: DeferredCall, index: int, form: TensorForm) -> DeferredTensor:
        return torch.Tensor._make_wrapper_subclass(cls, form.shape, dtype=form.dtype, device=form.device)

    def __init__(self, call: DeferredCall, index: int, form: TensorForm) -> None:
        self._call, self._index = call, index

    def computed(self) -> torch.Tensor:
        return self._call.leaf(self._index)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if op in SLICES:  # pipelines drop reference tokens by slicing, long before they read the others
            whole, *where = args
            shape = op(torch.empty(whole.shape, device="meta"), *where).shape
            part = DeferredCall(lambda: op(whole.computed(), *where))
            return DeferredTensor(part, 0, TensorForm(shape, whole.dtype, whole.device))
        args, kwargs = computed((args, kwargs or {}))
        return op(*args, **kwargs)


def deferred(form: Any, run: Callable[[], Any]) -> Any:
    """Return an output of that form with placeholders for the tensors that ``run`` returns."""
    call, (leaves, spec) = DeferredCall(run), pytree.tree_flatten(form)
    leaves = [DeferredTensor(call, i, leaf) if isinstance(leaf, TensorForm) else leaf for i, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(leaves, spec)


def computed(tree: Any) -> Any:
    """Replace deferred tensors in nested arguments by the computed ones."""
    return pytree.tree_map_only(DeferredTensor, DeferredTensor.computed, tree)


class ControlNetHook(Hook):
    """Defers a ControlNet's call if it is like the previous call, whose output then has the same form."""

    def __init__(self, names: list[str], *, defers: bool) -> None:
        super().__init__()
        self._names = names
        self._defers = defers  # False = every call runs at once, and the hook only remembers its arguments
        self._known: tuple[Any, Any] | None = None  # form of the latest call, and of its output
        self._of_thread = threading.local()

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of this thread's latest call by name, until :meth:`release`."""
        return getattr(self._of_thread, "arguments", {})

    def release(self) -> None:
        """Forgets this thread's latest call."""
        self._of_thread.arguments = {}

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        original, form, known = self.fn_ref.original_forward, call_form((args, kwargs)), self._known
        self._of_thread.arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if not self._defers:
            return original(*args, **kwargs)
        if _must_run_now(module) or known is None or known[0] != form:
            output = original(*args, **kwargs)
            self._known = form, pytree.tree_map_only(torch.Tensor, TensorForm.of, output)
            return output
        return deferred(known[1], lambda: original(*args, **kwargs))


def control_net(pipe: Any) -> torch.nn.Module | None:
    net = getattr(pipe, CONTROL_NET, None)
    return net if isinstance(net, torch.nn.Module) else None


def watch_net(net: torch.nn.Module, *, defers: bool) -> Callable[[], None]:
    """Hook a ControlNet; return a function that removes this hook, unless another of ours replaced it."""
    remove_hook(net)
    hook = ControlNetHook(parameter_names(net), defers=defers)
    register_hook(net, hook)
    references = weakref.ref(net), weakref.ref(hook)

    def stop() -> None:
        still, ours = (reference() for reference in references)
        if still is not None and find_hook(still) is ours:
            remove_hook(still)

    return stop


def hook_of(net: torch.nn.Module | None) -> ControlNetHook | None:
    hook = None if net is None else find_hook(net)
    return hook if isinstance(hook, ControlNetHook) else None


def call_form(tree: Any) -> tuple:
    """Key that decides the form of a call's output: everything except values, of which only flags count."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = tuple(TensorForm.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    return spec, tensors, tuple(leaf if isinstance(leaf, bool) else type(leaf) for leaf in leaves)


def _must_run_now(module: torch.nn.Module) -> bool:
    """Return True if the call can't be deferred: the module may move (offload), or gradients are needed."""
    registry = getattr(module, "_diffusers_hook", None)  # None: another thread has removed our hook
    is_moved = hasattr(module, "_hf_hook") or registry is None or registry._hook_order != [HOOK_NAME]
    is_cast = any(torch.is_autocast_enabled(device) for device in ("cuda", "cpu"))  # which may end before the call
    return is_moved or is_cast or is_compiled(module) or torch.is_grad_enabled()
