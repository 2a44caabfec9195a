"""ControlNets run before the transformer in every step; here only in those whose transformer reads what they give.

A DISPATCH step of level ``output`` runs no block, so nobody reads it. A call of the net waits until somebody does.
Its picture and its strength are part of what the transformer is conditioned on, at every level.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_accel.models.hooks import (
    HOOK_NAME,
    Hook,
    find_hook,
    is_compiled,
    parameter_names,
    register_hook,
    remove_hook,
)

NUMBERS = (bool, int, float)
CONTROL_NET = "controlnet"  # component of a pipeline: one net, or several in one
SLICES = (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default)  # a part, and a part that is the whole


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
        if op in SLICES:  # what a pipeline drops reference tokens by, long before it reads others
            whole, *where = args
            shape = op(torch.empty(whole.shape, device="meta"), *where).shape
            part = DeferredCall(lambda: op(whole.computed(), *where))
            return DeferredTensor(part, 0, TensorForm(shape, whole.dtype, whole.device))
        args, kwargs = computed((args, kwargs or {}))
        return op(*args, **kwargs)


def computed(tree: Any) -> Any:
    """Nested arguments with the tensors themselves in the place of deferred ones."""
    return pytree.tree_map_only(DeferredTensor, DeferredTensor.computed, tree)


class ControlNetHook(Hook):
    """Defers calls of a control net that are like the one before, whose output tells the form of theirs.

    Args:
        names: of what the net's forward takes, in order.
        defers: False = every call runs at once, and only its arguments are remembered.
    """

    def __init__(self, names: list[str], *, defers: bool) -> None:
        super().__init__()
        self._names = names
        self._defers = defers
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
        leaves, spec = pytree.tree_flatten(known[1])
        call = DeferredCall(lambda: original(*args, **kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, TensorForm):
                leaves[index] = DeferredTensor(call, index, leaf)
        return pytree.tree_unflatten(leaves, spec)


def control_net(pipe: Any) -> torch.nn.Module | None:
    """A pipeline's control net, if it is a pipeline and has one."""
    net = getattr(pipe, CONTROL_NET, None)
    return net if isinstance(net, torch.nn.Module) else None


def watch_net(net: torch.nn.Module, *, defers: bool) -> ControlNetHook:
    """Hooks a control net, in the place of an earlier hook of ours."""
    remove_hook(net)
    hook = ControlNetHook(parameter_names(net), defers=defers)
    register_hook(net, hook)
    return hook


def hook_of(net: torch.nn.Module | None) -> ControlNetHook | None:
    """The hook of a net that is watched."""
    hook = None if net is None else find_hook(net)
    return hook if isinstance(hook, ControlNetHook) else None


def stop_watching(net: torch.nn.Module, hook: ControlNetHook) -> None:
    """Takes that hook off, unless another pipeline with the same net has put its own in its place."""
    if find_hook(net) is hook:
        remove_hook(net)


def call_form(tree: Any) -> tuple:
    """What calls have in common whose outputs have the same form: everything but values, of which flags alone count."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = tuple(TensorForm.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    return spec, tensors, tuple(leaf if isinstance(leaf, bool) else type(leaf) for leaf in leaves)


def _must_run_now(module: torch.nn.Module) -> bool:
    """Whether a later call could find the module elsewhere, as where it is offloaded, or gradients need this one."""
    is_moved = hasattr(module, "_hf_hook") or module._diffusers_hook._hook_order != [HOOK_NAME]
    is_cast = any(torch.is_autocast_enabled(device) for device in ("cuda", "cpu"))  # which may end before the call
    return is_moved or is_cast or is_compiled(module) or torch.is_grad_enabled()
