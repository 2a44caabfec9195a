"""A transformer that is compiled whole: a run enters what was compiled in computed steps alone, and without our hook.

``transformer.compile()`` leaves its entry on the module, and ``torch.compile(transformer)`` on a wrapper around it. A
call through it runs all of the transformer, hooks included, under the compiler. What decides on a call must stand
outside, and a step that is forecast has nothing to compile (with ``fullgraph=True`` that is even an error). So calls go
past the entry to our hook. In computed steps the hook enters, with itself out of the way: the graph is that of the
transformer's own forward, the same as before it was accelerated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class CompiledEntry:
    """Stands where the compiler's entry was, and calls the transformer's hook instead.

    Args:
        holder: the transformer, or the wrapper around it.
        attribute: of the holder, under which the entry is.
        transformer: what was compiled.
    """

    def __init__(self, holder: nn.Module, attribute: str, transformer: nn.Module) -> None:
        self._holder, self._attribute, self._transformer = holder, attribute, transformer
        self._entry = getattr(holder, attribute)
        setattr(holder, attribute, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._transformer.forward(*args, **kwargs)

    def compute(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """The output of what was compiled, in tensors of its own: those of a captured graph are overwritten later.

        Args:
            forward: what lies beneath our hook on the transformer.
        """
        transformer = self._transformer
        hooked = transformer.forward
        if getattr(forward, "__func__", None) is type(transformer).forward:
            del transformer.forward  # as the compiler has seen it
        else:
            transformer.forward = forward
        try:
            output = self._entry(*args, **kwargs)
        finally:
            transformer.forward = hooked
        return pytree.tree_map_only(torch.Tensor, torch.clone, output)

    def put_back(self) -> None:
        """Undoes what putting this here has done, unless something else has taken its place."""
        for attribute in (self._attribute, "_old_forward"):  # where accelerate's offload has put it since
            if getattr(self._holder, attribute, None) is self:
                setattr(self._holder, attribute, self._entry)


def is_wrapper(called: Any, transformer: nn.Module) -> bool:
    """Whether what is called is what ``torch.compile(transformer)`` returns."""
    return called is not transformer and getattr(called, "_orig_mod", None) is transformer


def compiled_entry(transformer: nn.Module, called: Any, earlier: CompiledEntry | None = None) -> CompiledEntry | None:
    """What stands at the entry of a transformer that is compiled whole, put there if need be; None = it is not.

    Args:
        called: what a pipeline calls: the transformer, or the wrapper around it that ``torch.compile`` returns.
        earlier: what this has returned before, which goes if calls enter elsewhere by now.
    """
    wraps = is_wrapper(called, transformer)
    holder, attribute = (called, "forward") if wraps else (transformer, "_compiled_call_impl")
    current = getattr(holder, attribute)
    if isinstance(current, CompiledEntry):
        return current
    if wraps and hasattr(
        transformer, "_hf_hook"
    ):  # accelerate's offload puts its forward there, and takes it off again
        return earlier
    if earlier is not None:
        earlier.put_back()
    return None if current is None else CompiledEntry(holder, attribute, transformer)
