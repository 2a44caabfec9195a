"""Support for a transformer that is compiled whole: only computed steps run the compiled code, without our hook.

``transformer.compile()`` puts the compiled entry on the module, ``torch.compile(transformer)`` on a wrapper around it.
A call through the entry would compile our hook too, which must decide outside of the graph. So calls bypass the entry
and reach our hook first. In computed steps the hook removes itself and calls the entry: the compiled graph is that of
the transformer's own forward, the same as without acceleration.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.models.stand_in import StandIn


class CompiledEntry(StandIn):
    """Stand-in for the compiler's entry that calls the transformer's hook instead."""

    def __init__(self, holder: nn.Module, attribute: str, transformer: nn.Module) -> None:
        super().__init__(holder, attribute, lambda entry, holder, args, kwargs: transformer.forward(*args, **kwargs))
        self._transformer = transformer

    def compute(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled code and copy its output, because a captured graph overwrites its tensors later."""
        transformer = self._transformer
        hooked = transformer.forward
        if getattr(forward, "__func__", None) is type(transformer).forward:
            del transformer.forward  # as the compiler has seen it
        else:
            transformer.forward = forward
        try:
            output = self.original(*args, **kwargs)
        finally:
            transformer.forward = hooked
        return pytree.tree_map_only(torch.Tensor, torch.clone, output)

    def leave(self, holder: Any = None) -> None:
        super().leave(holder)
        holder = self._holder()
        if getattr(holder, "_old_forward", None) is self:  # where accelerate's offload has put it since
            holder._old_forward = self._replaced


def is_wrapper(called: Any, transformer: nn.Module) -> bool:
    """Return True if ``called`` is the wrapper that ``torch.compile(transformer)`` returns."""
    return called is not transformer and getattr(called, "_orig_mod", None) is transformer


def compiled_entry(transformer: nn.Module, called: Any, earlier: CompiledEntry | None = None) -> CompiledEntry | None:
    """Replace the entry of a transformer that is compiled whole, if not done yet; None = it is not compiled whole.

    The pipeline calls ``called``; the result of the previous call, ``earlier``, goes if calls no longer enter there.
    """
    wraps = is_wrapper(called, transformer)
    holder, attribute = (called, "forward") if wraps else (transformer, "_compiled_call_impl")
    current = getattr(holder, attribute)
    if isinstance(current, CompiledEntry):
        return current
    if wraps and hasattr(transformer, "_hf_hook"):  # accelerate's offload puts its forward there, and takes it off
        return earlier
    if earlier is not None:
        earlier.leave()
    return None if current is None else CompiledEntry(holder, attribute, transformer)
