"""Ops run without gradients; those that sparse linear attention needs are torch's own in compiled models.

:func:`eager_op` is for ops that only code of ours calls, outside of compiled graphs: there they break the graph. With
:func:`custom_op` ``dit_accel.kernels.<op>`` in Python is ``torch.ops.dit_accel.<op>`` in a graph. Python calls the
function directly, because dispatching an op by name costs microseconds; while a compiler traces, it calls the op of its
name instead. So the graph does not break, and only the unpacking of arguments is traced. Schemas are derived from the
annotations: a parameter with several fields becomes one argument per field, ``plan_kv_index`` and ``plan_tokens``.

An op's results must be new tensors. If the function writes into arguments (``out``), the op returns nothing.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

NAMESPACE = "dit_accel"
_Function = TypeVar("_Function", bound=Callable)
_TYPES = {torch.Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str"}


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
    parameters = {name: _parts(name, hints[name]) for name in signature}
    results = _parts("result", hints["return"])

    def keywords(values: Iterable) -> dict[str, Any]:
        remaining = iter(values)
        return {name: parts.put_together(remaining) for name, parts in parameters.items()}

    def compute(*values: Any) -> Any:
        output = function(**keywords(values))
        return None if writes else _apart_in_memory(results.take_apart(output))

    def fake(*values: Any) -> Any:
        return None if writes or empty is None else _one_or_tuple(results.take_apart(empty(**keywords(values))))

    arguments = ", ".join(leaf.declared(writes) for parts in parameters.values() for leaf in parts.leaves)
    returned = ", ".join("Tensor" for _ in results.leaves if not writes)
    schema = f"({arguments}) -> " + (returned if returned == "Tensor" else f"({returned})")
    name = function.__name__.removeprefix("_")
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", compute, mutates_args=writes, schema=schema)
    op.register_fake(fake)

    def in_graph(*args: Any, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(signature, args, strict=False)), **kwargs}
        if writes and empty is not None and arguments["out"] is None:
            arguments["out"] = empty(**arguments)
        with torch.no_grad():
            output = op(*[value for name, parts in parameters.items() for value in parts.take_apart(arguments[name])])
        if writes:
            return arguments.get("out")
        return results.put_together(iter([output] if isinstance(output, torch.Tensor) else output))

    return in_graph


class _Leaf(NamedTuple):
    """An argument of the op."""

    name: str
    type: str
    optional: bool

    def declared(self, writes: frozenset[str]) -> str:
        """Return the argument as written in the schema."""
        alias = f"({self.name}!)" if self.name in writes else ""
        return f"{self.type}{alias}{'?' if self.optional else ''} {self.name}"


class _Parts(NamedTuple):
    """Arguments of the op that hold one parameter of the function, and the conversions between both."""

    leaves: list[_Leaf]
    take_apart: Callable[[Any], list]
    put_together: Callable[[Iterator], Any]  # consumes its own values


def _parts(name: str, hint: Any, optional: bool = False) -> _Parts:
    """Return the arguments that an annotation describes."""
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = (option for option in get_args(hint) if option is not types.NoneType)
        optional = True
    if hint in _TYPES:
        return _Parts([_Leaf(name, _TYPES[hint], optional)], lambda value: [value], next)
    make = hint
    if dataclasses.is_dataclass(hint):
        fields = get_type_hints(hint)
    elif hint is slice:
        fields = {"start": int | None, "stop": int | None}
    elif get_origin(hint) is tuple:
        fields, make = dict(enumerate(get_args(hint))), lambda *values: values
    else:
        assert hint is types.NoneType, f"{name}: no schema has {hint}"
        fields = {}
    parts = [_parts(f"{name}_{field}", entry, optional) for field, entry in fields.items()]

    def take_apart(value: Any) -> list:
        values = value if isinstance(value, tuple) else [getattr(value, str(field), None) for field in fields]
        return [leaf for part, entry in zip(parts, values, strict=True) for leaf in part.take_apart(entry)]

    def put_together(values: Iterator) -> Any:
        entries = [part.put_together(values) for part in parts]
        return None if optional and all(entry is None for entry in entries) else make(*entries)

    return _Parts([leaf for part in parts for leaf in part.leaves], take_apart, put_together)


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
