"""Ops in compiled models: ``dit_accel.kernels.<op>`` in Python is ``torch.ops.dit_accel.<op>`` in a graph.

Dispatching an op by name costs microseconds, and a computed step makes hundreds of calls, so Python calls the function
directly. While a compiler traces, the same function calls the op of its name instead. So the graph does not break, and
only the unpacking of arguments is traced. Schemas allow only tensors and numbers. They are derived from the
annotations, and an argument with several fields, such as a plan, becomes one argument per field: ``plan_kv_index``,
``plan_tokens``.

An op's results must be new tensors. If the function writes into arguments (``out``), the op returns nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

NAMESPACE = "dit_accel"
_Function = TypeVar("_Function", bound=Callable)
_TYPES = {
    torch.Tensor: "Tensor",
    Sequence[torch.Tensor]: "Tensor[]",
    Sequence[float]: "float[]",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
}


def custom_op(empty: Callable | None = None, *, writes: Sequence[str] = ()) -> Callable[[_Function], _Function]:
    """Register a function of tensors, without gradients, as the op of its name.

    Args:
        empty: function of the same keyword arguments (unused ones may go into ``**_``) that returns uninitialised
            tensors like the function's results. With ``writes`` it makes ``out`` if the caller passes none. Its
            arguments are not checked yet.
        writes: arguments, by their names in the op, that the function writes into. The op then returns nothing, and the
            function returns ``out``, if it has one.
    """

    def decorate(function: _Function) -> _Function:
        in_graph = _registered(function, empty, frozenset(writes))
        guarded = torch.no_grad()(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return in_graph(*args, **kwargs)
            # the guard takes 4 us, which pipelines avoid because gradients are already off
            return (guarded if torch.is_grad_enabled() else function)(*args, **kwargs)

        return call

    return decorate


def like(*names: str) -> Callable:
    """Return an ``empty`` for ``custom_op`` if each result is contiguous and like the argument of that name."""

    def empty(**given: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return _one_or_tuple([torch.empty_like(given[name], memory_format=torch.contiguous_format) for name in names])

    return empty


def _registered(function: Callable, empty: Callable | None, writes: frozenset[str]) -> Callable:
    """Register the function as an op, and return a function that calls the op with the function's arguments."""
    hints, signature = get_type_hints(function), inspect.signature(function).parameters
    defaults = {name: each.default for name, each in signature.items() if each.default is not each.empty}
    names = list(signature)
    parameters = [_part(name, hints[name]) for name in names]
    results = _part("result", hints["return"])

    def given(values: Iterable) -> dict[str, Any]:
        remaining = iter(values)
        return {each.name: each.put_together(remaining) for each in parameters}

    def compute(*values: Any) -> Any:
        made = function(**given(values))
        return None if writes else _apart_in_memory(results.take_apart(made))

    def fake(*values: Any) -> Any:
        return None if writes or empty is None else _one_or_tuple(results.take_apart(empty(**given(values))))

    arguments = ", ".join(leaf.declared(writes) for each in parameters for leaf in each.leaves())
    returned = ", ".join("Tensor" for _ in results.leaves() if not writes)
    schema = f"({arguments}) -> " + (returned if returned == "Tensor" else f"({returned})")
    name = function.__name__.removeprefix("_")
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", compute, mutates_args=writes, schema=schema)
    op.register_fake(fake)

    def in_graph(*args: Any, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if writes and empty is not None and arguments["out"] is None:
            arguments["out"] = empty(**arguments)
        with torch.no_grad():
            made = op(*[value for each in parameters for value in each.take_apart(arguments[each.name])])
        if writes:
            return arguments.get("out")
        return results.put_together(iter([made] if isinstance(made, torch.Tensor) else made))

    return in_graph


@dataclass(frozen=True)
class _Part:
    """A parameter of a function, or a part of one.

    Args:
        name: name of the op's argument, if it is one.
        type: type in the schema; empty if it has parts.
        optional: True if it may be None.
        parts: its parts.
        split: returns the values of its parts.
        make: returns its value, from the values of its parts.
    """

    name: str
    type: str
    optional: bool
    parts: tuple[_Part, ...] = ()
    split: Callable[[Any], Sequence] | None = None
    make: Callable[..., Any] | None = None

    def leaves(self) -> Iterator[_Part]:
        if self.type:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def declared(self, writes: frozenset[str]) -> str:
        """Return the op's argument as written in the schema."""
        base, brackets = (self.type[:-2], "[]") if self.type.endswith("[]") else (self.type, "")
        alias = f"({self.name}!)" if self.name in writes else ""
        return f"{base}{alias}{brackets}{'?' if self.optional else ''} {self.name}"

    def take_apart(self, value: Any) -> list:
        """Return the values of its leaves."""
        if self.type:
            return [list(value) if self.type.endswith("[]") else value]
        values = [None] * len(self.parts) if value is None or self.split is None else self.split(value)
        return [leaf for part, held in zip(self.parts, values, strict=True) for leaf in part.take_apart(held)]

    def put_together(self, values: Iterator) -> Any:
        """Undo :meth:`take_apart`; consume its own values from ``values``."""
        if self.type:
            return next(values)
        made = [part.put_together(values) for part in self.parts]
        none = self.make is None or (self.optional and all(value is None for value in made))
        return None if none else self.make(*made)


def _part(name: str, hint: Any, optional: bool = False) -> _Part:
    """Return the part that an annotation describes."""
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = (each for each in get_args(hint) if each is not types.NoneType)
        optional = True
    if hint in _TYPES:
        return _Part(name, _TYPES[hint], optional)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        fields = [each.name for each in dataclasses.fields(hint)]
        parts = tuple(_part(f"{name}_{field}", hints[field], optional) for field in fields)
        return _Part(name, "", optional, parts, lambda value: [getattr(value, field) for field in fields], hint)
    if hint is slice:
        parts = tuple(_part(f"{name}_{end}", int, True) for end in ("start", "stop"))
        return _Part(name, "", optional, parts, lambda value: [value.start, value.stop], slice)
    if get_origin(hint) is tuple:
        parts = tuple(_part(f"{name}_{at}", each, optional) for at, each in enumerate(get_args(hint)))
        return _Part(name, "", optional, parts, list, lambda *values: values)
    assert hint is types.NoneType, f"{name}: no schema has {hint}"
    return _Part(name, "", True)


def _apart_in_memory(made: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return contiguous tensors; copy one that shares memory with an earlier one, which op results must not."""
    held: set[int] = set()
    apart = []
    for tensor in (each.contiguous() for each in made):
        address = tensor.untyped_storage().data_ptr()
        apart.append(tensor.clone() if address in held else tensor)
        held.add(address)
    return _one_or_tuple(apart)


def _one_or_tuple(made: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return made[0] if len(made) == 1 else tuple(made)
