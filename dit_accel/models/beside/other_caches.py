"""Detection of other caches on a transformer: caches of diffusers and cache-dit, and replaced forwards.

Two caches would each forecast from the other's forecasts, so another cache is an error. A forward that was replaced on
the class or on the transformer, and that is no known cache, keeps running; the report names it.
"""

from collections.abc import Callable, Iterator

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.models.hooks import is_known, is_known_class, modules_of, own_forward

TWO_CACHES = "two caches would each forecast from the other's forecasts"
# Modules of diffusers whose hooks forecast, without underscores. Its cache of a prompt's keys and values does not.
_CACHES = ("FasterCache", "FirstBlockCache", "MagCache", "PyramidAttentionBroadcast", "SeaCache", "TaylorSeerCache")
# Caches that replace a forward, in the names of their functions without underscores.
_REPLACING = ("TeaCache", "MagCache", "EasyCache", "DiCache", "TaylorSeer", "FirstBlockCache")


def refuse_other_cache(transformer: torch.nn.Module, name: str, *, by_hooks: bool = True) -> None:
    """Raise an :class:`UnsupportedError` if another cache is on a transformer."""
    if (found := _other_cache(transformer, name, by_hooks)) is not None:
        cache, way_off = found
        where = f"pipe.{name} ({type(transformer).__name__}) has {cache} on it, and {TWO_CACHES}"
        raise UnsupportedError(f"{where}: remove that one with {way_off}, or keep it and call restore_pipeline(pipe)")


def _other_cache(transformer: torch.nn.Module, name: str, by_hooks: bool) -> tuple[str, str] | None:
    """Return the other cache and the code that removes it; None = there is none."""
    if (cache := _cache_of(type(getattr(transformer, "_cache_config", None)))) is not None:
        return f"diffusers' {cache}", f"pipe.{name}.disable_cache()"
    if getattr(transformer, "_is_cached", False):
        return "a cache of cache-dit", "cache_dit.disable_cache(pipe)"
    forward, model = replaced_forward(transformer), type(transformer).__name__
    if forward is not None and getattr(transformer, "enable_teacache", False):
        return f"TeaCache ({place_of_definition(forward)})", f"{model}.enable_teacache = False"
    if forward is not None and (cache := _replacing_cache(transformer, forward)) is not None:
        way_off = f"{model}.forward = original, where original is the forward that was replaced"
        return f"{cache} ({place_of_definition(forward)})", way_off
    # A cache may have been added without enable_cache; looking for its hooks takes milliseconds.
    if by_hooks and (hooks := dict(_cache_hooks(transformer))):
        calls = "; ".join(f'registry.remove_hook("{hook}")' for hook in hooks)
        registry = f"registry = HookRegistry.check_if_exists_or_initialize(pipe.{name})"
        return f"diffusers' {next(iter(hooks.values()))}", f"`{registry}; {calls}`"
    return None


def set_cache_config(transformer: torch.nn.Module, config: object) -> None:
    """Set the config of the cache that diffusers finds on a transformer; None = diffusers finds no cache."""
    if config is not None:
        transformer._cache_config = config  # type: ignore[assignment]
    else:
        vars(transformer).pop("_cache_config", None)


def replaced_forward(transformer: torch.nn.Module) -> Callable | None:
    """Return the function that replaces the forward of a known class; None = it was not replaced."""
    forward = own_forward(transformer)
    return None if is_known(forward) or not is_known_class(type(transformer)) else forward


def replaced_forward_remark(transformer: torch.nn.Module, name: str) -> str | None:
    """Remark on a known class's forward that unknown code has replaced; None = it was not replaced."""
    if (forward := replaced_forward(transformer)) is None:
        return None
    place = f"{place_of_definition(forward)} in place of {type(transformer).__name__}'s own forward"
    return f"pipe.{name} runs {place}; if it skips steps itself, remove it: {TWO_CACHES}"


def _replacing_cache(transformer: torch.nn.Module, forward: Callable) -> str | None:
    """Return the cache that a replaced forward belongs to, by its name; None = it is unknown or disabled."""
    if hasattr(transformer, "enable_teacache"):
        return None
    while forward is not None:
        name = getattr(getattr(forward, "__code__", None), "co_qualname", "").lower().replace("_", "")
        found = next((cache for cache in _REPLACING if cache.lower() in name), None)
        if found is not None:
            return found
        forward = getattr(forward, "__wrapped__", None)
    return None


def place_of_definition(function: Callable) -> str:
    code = getattr(function, "__code__", None)
    return repr(function) if code is None else f"{code.co_qualname} of {code.co_filename}:{code.co_firstlineno}"


def _cache_hooks(transformer: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each cache hook on a transformer's modules, and its cache."""
    registries = [held["_diffusers_hook"] for held in map(vars, modules_of(transformer)) if "_diffusers_hook" in held]
    for name, kind in dict.fromkeys((name, type(hook)) for item in registries for name, hook in item.hooks.items()):
        if (cache := _cache_of(kind)) is not None:
            yield name, cache


def _cache_of(kind: type) -> str | None:
    package, _, module = kind.__module__.rpartition(".")
    name = module.replace("_", "") if package == "diffusers.hooks" else None
    return next((cache for cache in _CACHES if cache.lower() == name), None)
