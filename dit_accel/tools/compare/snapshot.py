"""What a pipeline's transformers carry, so that whatever a method leaves on them can be found and taken off."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dit_accel.models import denoisers


class Snapshot:
    """Attributes of a pipeline's transformers, of all their modules, and of the classes of these and of the pipeline.

    Args:
        pipe: a plain pipeline that has run once, so that what runs make for themselves is there.
    """

    def __init__(self, pipe: Any) -> None:
        modules = [module for transformer in denoisers(pipe).values() for module in transformer.modules()]
        self._modules = [(module, dict(vars(module))) for module in modules]
        self._classes = [(cls, dict(vars(cls))) for cls in {type(pipe), *map(type, modules)}]
        self._pipe = pipe, set(vars(pipe))

    def restore(self) -> dict[str, int]:
        """Puts every attribute back; names of those that were new or others, and on how many objects they were."""
        left: Counter[str] = Counter()
        for holder, before in (*self._classes, *self._modules):
            now = vars(holder)
            for name in [name for name in now if now[name] is not before.get(name, _MISSING)]:
                left[name] += 1
                delattr(holder, name) if name not in before else setattr(holder, name, before[name])
            for name in before.keys() - now.keys():
                setattr(holder, name, before[name])
        pipe, names = self._pipe
        for name in vars(pipe).keys() - names:
            left[name] += 1
            delattr(pipe, name)
        return dict(left)


_MISSING = object()
