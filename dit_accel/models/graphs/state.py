"""State of a model that a CUDA graph reads on the host: addresses of weights, and attributes that are no tensors.

A graph repeats launches. It was captured with certain numbers, strings and flags in attributes, strengths of adapters,
processors, hooks and code of classes. They are compared before each replay: first by identity, which is quick, then by
value if an object was replaced. Values of weights may change, because a graph reads them from their addresses.
"""

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from operator import call, is_, itemgetter, methodcaller
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from dit_accel.loop.conditioning import PLAIN_TENSORS, version_of
from dit_accel.models.stored_weights import parts_of

NUMBERS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum)
SEQUENCES = (list, tuple, set, frozenset, deque)
OF_TENSORS = ("_parameters", "_buffers")  # attributes of modules; replaced tensors are not kept alive
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
TORCHS_OWN = vars(nn.Module()).keys() - {"training", "_modules", *OF_TENSORS}  # attributes that all modules have
FOREIGN = {*sys.stdlib_module_names, "torch", "builtins"}  # packages whose objects are not followed


class ModelState:
    """Snapshot of everything that a graph reads from a model on the host.

    Modules, containers and other objects are followed through their attributes. Hooks, functions, and objects of torch
    and Python's standard library are compared by identity alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[tuple[str, ...], dict[str, dict]] = {}  # attributes of modules, by the modules' names
        self._dicts: dict[str, dict] = {}  # entries of dicts and attributes of other objects, by the owner's name
        self._sequences: dict[str, Any] = {}
        self._classes: dict[str, Any] = {}
        self._weights: dict[str, dict] = {}
        self._empty: list[Any] = []  # empty containers
        found = self._follow()
        self._counts, self._keys, self._held = self._numbers_of_attributes(), self._entries(), self._values()
        weights = self._weights_now()
        stored = [part for item in weights if item is not None for part in parts_of(item)]
        self._refs = [type(None) if item is None else weakref.ref(item) for item in weights]
        self._tensors = [weakref.ref(item) for item in (*stored, *found) if type(item) in PLAIN_TENSORS]
        self._numbers = [item for item in found if type(item) in PLAIN_TENSORS and item.device.type == "cpu"]
        self._places, self._versions = self._placed(), self._written()
        self._paths = [*self._named()]

    def change(self) -> str | None:
        """Return the name of something that has changed since the snapshot, or None."""
        if self._is_identical():
            return None
        new = ModelState(self._model)
        before, now = self._by_path(), new._by_path()
        changed = next((path for path in {**before, **now} if not _are_same(path, before, now)), None)
        if changed is None and self._places != new._places:
            changed = "the address of a weight"
        if changed is None and self._written() != self._versions:
            changed = "a number in a CPU tensor"
        if changed is None:
            vars(self).update(vars(new))
        return changed

    def _is_identical(self) -> bool:
        try:
            if any(self._empty) or self._numbers_of_attributes() != self._counts or self._entries() != self._keys:
                return False
            held, weights = self._values(), self._weights_now()
        except (KeyError, RuntimeError):  # an attribute is gone, or another thread is removing it
            return False
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return False
        if len(weights) != len(self._refs) or not all(map(is_, weights, map(call, self._refs))):
            return False
        return self._placed() == self._places and self._written() == self._versions

    def _numbers_of_attributes(self) -> list[int]:
        return [*map(len, chain.from_iterable(map(dict.values, self._modules.values())))]

    def _entries(self) -> list[Any]:
        return [*chain.from_iterable(self._dicts.values())]

    def _values(self) -> list[Any]:
        of_modules = (map(itemgetter(*names), modules.values()) for names, modules in self._modules.items())
        return [
            *chain.from_iterable(chain.from_iterable(of_modules)),
            *chain.from_iterable(map(dict.values, self._dicts.values())),
            *chain.from_iterable(self._sequences.values()),
            *chain.from_iterable(map(methodcaller("values"), self._classes.values())),
        ]

    def _weights_now(self) -> list[torch.Tensor | None]:
        return [*chain.from_iterable(map(dict.values, self._weights.values()))]

    def _placed(self) -> list:
        tensors = [*map(call, self._tensors)]
        try:
            return [*map(torch.Tensor.data_ptr, tensors), *map(torch.Tensor.stride, tensors)]
        except TypeError:  # one was freed, such as a bias that is None now
            return []

    def _written(self) -> list[int | None]:
        """Version of each CPU tensor, whose numbers the host may read, such as peft's strengths."""
        return [*map(version_of, self._numbers)]

    def _named(self) -> Iterator[str]:
        of_modules = ((name, names) for names, modules in self._modules.items() for name in modules)
        places = ((name, range(len(item))) for name, item in self._sequences.items())
        owners = chain(of_modules, self._dicts.items(), places, self._classes.items(), self._weights.items())
        return (_joined(name, key) for name, keys in owners for key in keys)

    def _by_path(self) -> dict[str, Any]:
        return dict(zip(self._paths, chain(self._held, map(call, self._refs)), strict=True))

    def _follow(self) -> list[torch.Tensor]:
        """Fill the snapshot's containers, and return tensors in them that are no weights."""
        found: list[torch.Tensor] = []
        seen: set[int] = set()
        waiting: deque[tuple[str, Any]] = deque([("", self._model)])
        while waiting:
            name, item = waiting.popleft()
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, torch.Tensor):
                found.append(item)
                continue
            for key, value in self._take(name, item):
                if type(value) not in NUMBERS and value is not None and _is_followed(value):
                    waiting.append((_joined(name, key), value))
        return found

    def _take(self, name: str, item: Any) -> Iterator[tuple[Any, Any]]:
        """Store an object's contents, and yield those that may hold more."""
        if isinstance(item, nn.Module):
            held = vars(item)
            keys = tuple(key for key in held if key not in TORCHS_OWN)
            self._modules.setdefault(keys, {})[name] = held
            self._take_class(type(item))
            for key in (*HOOKS, *OF_TENSORS, "_modules"):
                if item is self._model and key in HOOKS:  # they run before and after the graph
                    continue
                if not held[key]:
                    self._empty.append(held[key])
                elif key in OF_TENSORS:
                    self._weights[name if key == OF_TENSORS[0] else f"{name} (buffers)"] = held[key]
                else:
                    self._dicts[_joined(name, key)] = held[key]
            yield from held["_modules"].items()
            yield from ((key, held[key]) for key in keys if key not in ("_modules", *OF_TENSORS))
        elif isinstance(item, HookRegistry):
            yield from (("hooks", item.hooks), ("order", item._hook_order))
        elif isinstance(item, (dict, *SEQUENCES)) and not item:
            self._empty.append(item)
        elif isinstance(item, SEQUENCES):
            self._sequences[name] = item
            yield from enumerate(item)
        elif isinstance(item, dict):
            self._dicts[name] = item
            yield from item.items()
        else:
            self._dicts[name] = vars(item)
            self._take_class(type(item))
            yield from vars(item).items()

    def _take_class(self, cls: type) -> None:
        for item in cls.__mro__[:-1]:
            self._classes[f"{item.__module__}.{item.__qualname__}"] = item.__dict__


def _is_followed(value: Any) -> bool:
    """Return True if the contents of ``value`` are compared, not only its identity."""
    if isinstance(value, (nn.Module, torch.Tensor, dict, *SEQUENCES, HookRegistry, SimpleNamespace)):
        return True
    if isinstance(value, (type, ModelHook)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in FOREIGN


def _are_same(path: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return True if a graph that read ``before`` may be replayed with ``now``; entries are compared separately."""
    if path not in before or path not in now:
        return False
    old, new = before[path], now[path]
    if old is new or type(old) is not type(new):
        return old is new
    return isinstance(new, (dict, *SEQUENCES)) or (isinstance(new, NUMBERS) and old == new)


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
