"""Record the attributes of a pipeline's transformers, to find and remove changes that a method leaves."""

from collections import Counter
from typing import Any

from dit_accel.models import denoisers


class Snapshot:
    """Attributes of a pipeline's transformers, of all their modules, and of the classes of these and of the pipeline.

    The plain pipeline must have run once, so that attributes created by runs exist.
    """

    def __init__(self, pipe: Any) -> None:
        modules = [module for transformer in denoisers(pipe).values() for module in transformer.modules()]
        self._modules = [(module, dict(vars(module)), _hooks(module)) for module in modules]
        self._classes = [(cls, dict(vars(cls)), []) for cls in {type(pipe), *map(type, modules)}]
        self._pipe = pipe, set(vars(pipe))

    def restore(self) -> dict[str, int]:
        """Restore every attribute; return the changed names, and the number of objects for each."""
        left: Counter[str] = Counter()
        for holder, before, hooks in (*self._classes, *self._modules):
            now = vars(holder)
            anew = _OF_OFFLOAD if "_hf_hook" in before or (hooks and hooks == _hooks(holder)) else ()
            names = before.keys() | now.keys()
            for name in [name for name in names if now.get(name, _MISSING) is not before.get(name, _MISSING)]:
                left[name] += name in now and name not in anew
                setattr(holder, name, before[name]) if name in before else delattr(holder, name)
        pipe, names = self._pipe
        for name in vars(pipe).keys() - names:
            left[name] += 1
            delattr(pipe, name)
        return dict(+left)


def _hooks(module: Any) -> list[str]:
    """Return the names of diffusers' hooks on a module, which wrap its forward anew when one of them is removed."""
    return [*getattr(vars(module).get("_diffusers_hook"), "_hook_order", ())]


_MISSING = object()
_OF_OFFLOAD = ("_hf_hook", "_old_forward", "forward")  # which a pipeline hooks anew after each call
