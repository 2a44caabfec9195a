"""Detect that the conditioning changes within a run: its prompt, its guidance, the strength of an adapter.

Forecasts extrapolate the outputs of one conditioning, and corrections interpolate between them, so records of another
conditioning make both wrong. A change is an item that held its value from one call to the next and then differs. An
item that differs at every call, such as the residuals of a ControlNet, belongs to the step and is no change.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # compared by value; reading a subclass may run code
VALUES = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype, torch.device)  # compared by value
SETTINGS = (*PLAIN_TENSORS, int, float, tuple)  # values that may have changed already at the second call
MODES = (bool, str)  # values that select what a call computes
VERSION = attrgetter("_version")
GONE = object()  # a tensor that differed twice and has been freed


@dataclass
class _Item:
    """Latest value of an item."""

    value: Any  # or a weak reference to a tensor that differed twice
    version: int | None  # of the tensor at that time; None = not a tensor
    copy: torch.Tensor | None  # values of a tensor that counts no versions, because it may be changed in place
    calls: int = 1  # number of calls that had the item, up to 3
    holds: bool = False  # the latest comparison found no difference
    moved: bool = False  # the first comparison found a difference between two numbers, settings or tensors

    @property
    def latest(self) -> Any:
        """The value; GONE = the tensor has been freed."""
        if not isinstance(self.value, weakref.ref):
            return self.value
        tensor = self.value()
        return GONE if tensor is None else tensor


class Conditioning:
    """Conditioning of one branch of guidance at its latest call.

    Attributes:
        new_modes: names of the strings and bools of the latest call that differ from the call before, such as those of
            a key-value cache; the output may then have another shape.
        moved: the latest call is the second, and differs from the first in numbers, settings or tensors. The next call
            shows whether they changed or differ at every call.
    """

    def __init__(self) -> None:
        self._items: dict[str, _Item] = {}
        self._settled: tuple[list[str], list[int]] | None = None  # names and ids of the items; None = some may change
        self._tensors: list[torch.Tensor] = []  # of the settled items
        self._versions: list[int] = []
        self._calls = 0
        self.new_modes: list[str] = []
        self.moved = False

    def changed(self, items: Mapping[str, Any]) -> list[str]:
        """Compare the items of a call with the items of the call before, and record them.

        Tensors are compared by address and version. Tensors that a pipeline creates anew at each step are compared by
        value: the host then waits for the GPU, once for all. Objects but tensors, numbers and strings: by identity.

        Returns:
            Names of three kinds of items: items that held their value before and differ now; numbers, settings and
            tensors that changed between the first two calls and hold since; items that were added or removed.
        """
        self._calls += 1
        identities = [*items], [*map(id, items.values())]
        if identities == self._settled and [*map(VERSION, self._tensors)] == self._versions:
            return []
        self._settled = None
        fresh = {name: value for name, value in items.items() if not _is_settled(self._items.get(name), value)}
        if not fresh and self._items.keys() == items.keys():
            self.new_modes, self.moved = [], False
            self._settled = identities
            self._tensors = [item.value for item in self._items.values() if item.version is not None]
            self._versions = [*map(VERSION, self._tensors)]
            return []
        differ = self._differing(fresh)
        self.new_modes = sorted(name for name in differ if type(items[name]) in MODES)
        found = [
            name
            for name, item in self._items.items()
            if name in fresh and (item.holds if name in differ else item.calls == 2 and item.moved)
        ]
        if self._calls > 2:
            found += sorted(self._items.keys() ^ items.keys())
        self._items = {
            name: _followed(self._items.get(name), value, name in differ) if name in fresh else self._items[name]
            for name, value in items.items()
        }
        self.moved = self._calls == 2 and any(item.moved for item in self._items.values())
        return found

    def _differing(self, items: Mapping[str, Any]) -> set[str]:
        """Return the names of the items whose value differs from the call before."""
        differ, pairs = set(), {}
        for name, value in items.items():
            item = self._items.get(name)
            if item is None or _is_same(item, value):
                continue
            before = item.latest if item.copy is None else item.copy
            if item.version == version_of(item.latest) and _may_be_equal(before, value):
                pairs[name] = before, value
            elif type(value) not in VALUES or type(before) is not type(value) or before != value:
                differ.add(name)
        return differ | _unequal(pairs)


def _followed(item: _Item | None, value: Any, differs: bool) -> _Item:
    """Return an item after one more call."""
    if item is None:
        return _Item(value, version_of(value), _copied(value))
    if differs and item.calls > 1 and not item.holds and type(value) in PLAIN_TENSORS:
        kept: Any = weakref.ref(value)  # it may be large, and will probably differ again
        return _Item(kept, version_of(value), None, 3, False, item.moved)
    copy = _copied(value) if differs or (item.copy is None and value is not item.value) else item.copy
    may_have_changed = differs and type(value) in SETTINGS and type(item.value) in SETTINGS
    moved = may_have_changed if item.calls == 1 else item.moved
    return _Item(value, version_of(value), copy, min(item.calls + 1, 3), not differs, moved)


def _is_settled(item: _Item | None, value: Any) -> bool:
    """Return True if a value is the same object as in the three calls before, and was not written to."""
    if item is None or item.value is not value or not item.holds or item.calls < 3 or item.copy is not None:
        return False
    return item.version is None or item.version == value._version


def _is_same(item: _Item, value: Any) -> bool:
    """Return True if a value is known to be unchanged without reading it."""
    if value is item.value and item.copy is None and (item.version is None or item.version == value._version):
        return True
    before = item.latest
    if not _may_be_equal(before, value):
        return value is before
    if item.copy is not None or item.version != version_of(value):
        return False
    # the same object, or a view made anew
    return value is before or (value.data_ptr() == before.data_ptr() != 0 and value.stride() == before.stride())


def _may_be_equal(before: Any, value: Any) -> bool:
    """Return True if both are tensors of one shape, dtype and device, so that their values can be compared."""
    are_tensors = type(before) in PLAIN_TENSORS and type(value) in PLAIN_TENSORS
    return are_tensors and (before.shape, before.dtype, before.device) == (value.shape, value.dtype, value.device)


def _unequal(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> set[str]:
    """Return the names of the pairs that differ; waits once for each device."""
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, (before, value) in pairs.items():
        by_device.setdefault(value.device, {})[name] = (before != value).any()
    return {
        name
        for found in by_device.values()
        for name, differs in zip(found, torch.stack(list(found.values())).tolist(), strict=True)
        if differs
    }


def version_of(value: Any) -> int | None:
    """Return the number of writes to a tensor, 0 if it counts none; None = not a tensor."""
    if type(value) not in PLAIN_TENSORS:
        return None
    return 0 if value.is_inference() else value._version


def _copied(value: Any) -> torch.Tensor | None:
    """Return a copy of a tensor that counts no versions; None for other values."""
    return value.clone() if type(value) in PLAIN_TENSORS and value.is_inference() else None
