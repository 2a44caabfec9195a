"""A callable in place of a module's method, which copies and pickles of the module do not have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class StandIn:
    """A callable in place of a module's method. A copied or pickled module has its class's own method.

    Args:
        call: gets the method, the module, and the arguments and keyword arguments of a call.
    """

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self.owner = getattr(call, "__self__", None)
        self._module = weakref.ref(module)
        self._name = name
        self._call = call
        self._replaced = vars(module).get(name)  # that somebody else has put there
        setattr(module, name, self)

    def __reduce__(self) -> tuple:
        module = self._module()  # which has no attributes yet when a copy of it reads this
        return (getattr, (module, self._name)) if self._replaced is None else (_same, (self._replaced,))

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method that it stands in for."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        module = self._module()
        return getattr(type(module), self._name)(module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the module's own code is what is to be compiled
            return self.original(*args, **kwargs)
        return self._call(self.original, self._module(), args, kwargs)

    def leave(self) -> None:
        """Put the method back, unless something has been put over this."""
        module = self._module()
        if module is not None and vars(module).get(self._name) is self:
            delattr(module, self._name)
            if self._replaced is not None:
                setattr(module, self._name, self._replaced)


def _same(forward: Any) -> Any:
    return forward
