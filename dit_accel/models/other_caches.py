"""Caches of diffusers and of cache-dit on a transformer, which would forecast from our forecasts as we from theirs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dit_accel.errors import UnsupportedError

# Modules of diffusers whose hooks forecast. Its cache of a prompt's keys and values forecasts nothing.
_CACHES = {
    "faster_cache": "FasterCache",
    "first_block_cache": "FirstBlockCache",
    "mag_cache": "MagCache",
    "pyramid_attention_broadcast": "PyramidAttentionBroadcast",
    "sea_cache": "SeaCache",
    "taylorseer_cache": "TaylorSeerCache",
}


def refuse_other_cache(transformer: torch.nn.Module, name: str, *, by_hooks: bool = True) -> None:
    """Raises if another cache is on a transformer.

    Args:
        name: the transformer's name in the pipeline.
        by_hooks: look for the hooks of a cache that was put on without ``enable_cache``, which takes milliseconds.

    Raises:
        UnsupportedError: there is one.
    """
    found = _other_cache(transformer, name, by_hooks)
    if found is not None:
        cache, way_off = found
        raise UnsupportedError(
            f"pipe.{name} ({type(transformer).__name__}) has {cache} on it, and two caches would each forecast from "
            f"what the other made up: take that one off with {way_off}, or keep it and call restore_pipeline(pipe)"
        )


def _other_cache(transformer: torch.nn.Module, name: str, by_hooks: bool) -> tuple[str, str] | None:
    """The other cache, and what takes it off; None = there is none."""
    config = getattr(transformer, "_cache_config", None)
    if config is not None and _cache_of(config) is not None:
        return f"diffusers' {_cache_of(config)}", f"pipe.{name}.disable_cache()"
    if getattr(transformer, "_is_cached", False):
        return "a cache of cache-dit", "cache_dit.disable_cache(pipe)"
    hooks = dict(_cache_hooks(transformer)) if by_hooks else {}
    if hooks:
        calls = "; ".join(f'registry.remove_hook("{hook}")' for hook in hooks)
        registry = f"registry = HookRegistry.check_if_exists_or_initialize(pipe.{name})"
        return f"diffusers' {next(iter(hooks.values()))}", f"`{registry}; {calls}`"
    return None


def _cache_hooks(transformer: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Names of the hooks of caches on a transformer's modules, and the cache."""
    for module in transformer.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook_name, hook in registry.hooks.items() if registry is not None else ():
            if (cache := _cache_of(hook)) is not None:
                yield hook_name, cache


def _cache_of(thing: object) -> str | None:
    """The cache that a config or hook of diffusers belongs to."""
    package, _, module = type(thing).__module__.rpartition(".")
    return _CACHES.get(module) if package == "diffusers.hooks" else None
