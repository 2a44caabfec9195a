"""Ops run without gradients; those that sparse linear attention needs are torch's own in compiled models.

:func:`eager_op` is for ops that only code of ours calls, outside of compiled graphs: there they break the graph. With
:func:`custom_op` ``dit_accel.kernels.<op>`` in Python is ``torch.ops.dit_accel.<op>`` in a graph. Dispatching an op by
name costs microseconds, and a computed step makes hundreds of calls, so Python calls the function directly. While a
compiler traces, the same function calls the op of its name instead. So the graph does not break, and only the unpacking
of arguments is traced. Schemas allow only tensors and numbers. They are derived from the annotations, and an argument
with several fields, such as a plan, becomes one argument per field: ``plan_kv_index``, ``plan_tokens``.

An op's results must be new tensors. If the function writes into arguments (``out``), the op returns nothing.
"""

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
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
}


def eager_op(function: _Function) -> _Function:
    """Run a function of tensors without gradients, and outside of compiled graphs."""

    def outside(*args: Any, **kwargs: Any) -> Any:
        # not where the op is defined: importing the compiler takes seconds
        return torch.compiler.disable(torch.no_grad()(function))(*args, **kwargs)

    return _switched(function, outside)


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
        return _switched(function, _registered(function, empty, frozenset(writes)))

    return decorate


def _switched(function: Callable, in_graph: Callable) -> Callable:
    """Return a function that calls ``in_graph`` while a compiler traces, and else ``function`` without gradients."""
    guarded = torch.no_grad()(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return in_graph(*args, **kwargs)
        # the guard takes 4 us, which pipelines avoid because gradients are already off
        return (guarded if torch.is_grad_enabled() else function)(*args, **kwargs)

    return call


def like(*names: str) -> Callable:
    """Return an ``empty`` for ``custom_op`` if each result is contiguous and like the argument of that name."""

    def empty(**arguments: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sources = [arguments[name] for name in names]
        return _one_or_tuple([torch.empty_like(x, memory_format=torch.contiguous_format) for x in sources])

    return empty


def _registered(function: Callable, empty: Callable | None, writes: frozenset[str]) -> Callable:
    """Register the function as an op, and return a function that calls the op with the function's arguments."""
    hints, signature = get_type_hints(function), inspect.signature(function).parameters
    defaults = {name: entry.default for name, entry in signature.items() if entry.default is not entry.empty}
    names = list(signature)
    parameters = [_part(name, hints[name]) for name in names]
    results = _part("result", hints["return"])

    def keywords(values: Iterable) -> dict[str, Any]:
        remaining = iter(values)
        return {part.name: part.put_together(remaining) for part in parameters}

    def compute(*values: Any) -> Any:
        output = function(**keywords(values))
        return None if writes else _apart_in_memory(results.take_apart(output))

    def fake(*values: Any) -> Any:
        return None if writes or empty is None else _one_or_tuple(results.take_apart(empty(**keywords(values))))

    arguments = ", ".join(leaf.declared(writes) for part in parameters for leaf in part.leaves())
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
            output = op(*[value for part in parameters for value in part.take_apart(arguments[part.name])])
        if writes:
            return arguments.get("out")
        return results.put_together(iter([output] if isinstance(output, torch.Tensor) else output))

    return in_graph


@dataclass(frozen=True)
class _Part:
    """A parameter of a function, or a part of one: an argument of the op, with a type, or made of parts itself."""

    name: str
    type: str
    optional: bool
    parts: tuple["_Part", ...] = ()
    split: Callable[[Any], Sequence] | None = None
    make: Callable[..., Any] | None = None

    def leaves(self) -> Iterator["_Part"]:
        if self.type:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def declared(self, writes: frozenset[str]) -> str:
        """Return the op's argument as written in the schema."""
        alias = f"({self.name}!)" if self.name in writes else ""
        return f"{self.type}{alias}{'?' if self.optional else ''} {self.name}"

    def take_apart(self, value: Any) -> list:
        """Return the values of its leaves."""
        if self.type:
            return [value]
        values = [None] * len(self.parts) if value is None or self.split is None else self.split(value)
        return [leaf for part, entry in zip(self.parts, values, strict=True) for leaf in part.take_apart(entry)]

    def put_together(self, values: Iterator) -> Any:
        """Undo :meth:`take_apart`; consume its own values from ``values``."""
        if self.type:
            return next(values)
        fields = [part.put_together(values) for part in self.parts]
        none = self.make is None or (self.optional and all(value is None for value in fields))
        return None if none else self.make(*fields)


def _part(name: str, hint: Any, optional: bool = False) -> _Part:
    """Return the part that an annotation describes."""
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = (option for option in get_args(hint) if option is not types.NoneType)
        optional = True
    if hint in _TYPES:
        return _Part(name, _TYPES[hint], optional)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        fields = [field.name for field in dataclasses.fields(hint)]
        parts = tuple(_part(f"{name}_{field}", hints[field], optional) for field in fields)
        return _Part(name, "", optional, parts, lambda value: [getattr(value, field) for field in fields], hint)
    if hint is slice:
        parts = tuple(_part(f"{name}_{end}", int, True) for end in ("start", "stop"))
        return _Part(name, "", optional, parts, lambda value: [value.start, value.stop], slice)
    if get_origin(hint) is tuple:
        parts = tuple(_part(f"{name}_{at}", entry, optional) for at, entry in enumerate(get_args(hint)))
        return _Part(name, "", optional, parts, list, lambda *values: values)
    assert hint is types.NoneType, f"{name}: no schema has {hint}"
    return _Part(name, "", True)


def _apart_in_memory(results: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return contiguous tensors; copy one that shares memory with an earlier one, which op results must not."""
    addresses: set[int] = set()
    apart = []
    for result in results:
        tensor = result.contiguous()
        address = tensor.untyped_storage().data_ptr()
        apart.append(tensor.clone() if address in addresses else tensor)
        addresses.add(address)
    return _one_or_tuple(apart)


def _one_or_tuple(tensors: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
