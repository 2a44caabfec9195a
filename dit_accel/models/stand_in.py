"""A callable in place of an object's method, which copies and pickles of the object do not have."""

import weakref
from collections.abc import Callable
from typing import Any

import torch


class StandIn:
    """A callable in place of a method. A copied or pickled holder has its class's own method."""

    def __init__(self, holder: Any, name: str, call: Callable[..., Any]) -> None:
        self.owner = getattr(call, "__self__", None)
        self._holder = weakref.ref(holder)
        self._name = name
        self._call = call  # gets the method, the holder, and the arguments and keyword arguments of a call
        self._replaced = vars(holder).get(name)  # that somebody else has put there
        setattr(holder, name, self)

    def __reduce__(self) -> tuple:
        holder = self._holder()  # which has no attributes yet when a copy of it reads this
        return (getattr, (holder, self._name)) if self._replaced is None else (_same, (self._replaced,))

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method that it stands in for."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        holder = self._holder()
        if (method := getattr(type(holder), self._name)) is None:  # a module's entry of compiled code
            return holder._call_impl(*args, **kwargs)
        return method(holder, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the holder's own code is what is to be compiled
            return self.original(*args, **kwargs)
        return self._call(self.original, self._holder(), args, kwargs)

    def leave(self, holder: Any = None) -> None:
        """Put the method back, unless something has been put over this; ``holder`` may be a shallow copy."""
        holder = self._holder() if holder is None else holder
        if holder is not None and vars(holder).get(self._name) is self:
            if self._replaced is None:
                delattr(holder, self._name)
            else:
                setattr(holder, self._name, self._replaced)


def _same(forward: Any) -> Any:
    return forward
