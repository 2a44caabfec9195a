"""Acceleration through diffusers' own call: ``pipe.transformer.enable_cache(ClosedLoopConfig())``.

diffusers chooses a cache by the class of its config and takes no classes from outside. So importing this module, as
``from dit_accel import ClosedLoopConfig`` does, replaces the methods ``enable_cache`` and ``disable_cache`` of
``CacheMixin`` by functions that take this class, and call diffusers' own with the same arguments for other configs.
"""

import functools
from pathlib import Path
from typing import Any

import diffusers

from dit_accel.errors import UnsupportedError
from dit_accel.models.beside.other_caches import set_cache_config
from dit_accel.models.hooks import find_hook
from dit_accel.models.presets import load_preset
from dit_accel.pipeline import accelerate_transformer
from dit_accel.presets import Preset, default_preset

_MARK = "takes_closed_loop_config"  # attribute of our functions on CacheMixin


class ClosedLoopConfig:
    """Config with which diffusers' ``enable_cache`` accelerates a transformer.

    >>> from dit_accel import ClosedLoopConfig, report
    >>> pipe.transformer.enable_cache(ClosedLoopConfig(target_error=0.15))  # doctest: +SKIP
    >>> image = pipe("a red fox in the snow").images[0]  # doctest: +SKIP
    >>> print(report(pipe.transformer))  # doctest: +SKIP
    >>> pipe.transformer.disable_cache()  # doctest: +SKIP

    A pipeline with one transformer runs as with :func:`~dit_accel.accelerate_pipeline`, except for the parts outside of
    the transformer: decoding and prompts are not accelerated, and a ControlNet runs in every step. A pipeline with
    several transformers is better accelerated by ``accelerate_pipeline``, which lets them decide together; here each
    decides for itself. One config may serve many transformers.

    Importing this class replaces two methods of diffusers' ``CacheMixin``, which run unchanged for other configs.
    ``restore_pipeline`` undoes ``enable_cache`` too.

    Args:
        preset: name, path or :class:`Preset`; None = `balanced`; see :func:`~dit_accel.accelerate_transformer`.
        overrides: preset keys to change; see :func:`~dit_accel.accelerate_pipeline`.

    Raises:
        PresetError: unknown preset, key or value.
        UnsupportedError: this diffusers has no ``CacheMixin``. ``enable_cache`` raises this error if the preset does
            not fit the transformer, or the transformer is accelerated or has another cache.
    """

    def __init__(self, preset: str | Path | Preset | None = None, **overrides: Any) -> None:
        if not hasattr(diffusers, "CacheMixin"):
            raise UnsupportedError(f"diffusers {diffusers.__version__} has no CacheMixin: use accelerate_pipeline")
        load_preset(default_preset(preset, is_video=False), **overrides)
        self.preset = preset
        self.overrides = overrides

    def __repr__(self) -> str:
        options = {} if self.preset is None else {"preset": self.preset}
        return f"ClosedLoopConfig({', '.join(f'{key}={value!r}' for key, value in (options | self.overrides).items())})"


def _extend_cache_mixin(mixin: Any) -> None:
    """Let ``enable_cache`` and ``disable_cache`` of a class take a :class:`ClosedLoopConfig`, if they do not yet."""
    enable, disable = mixin.enable_cache, mixin.disable_cache
    if hasattr(enable, _MARK):
        return

    @functools.wraps(enable)
    def enable_cache(self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(config, ClosedLoopConfig) or self.is_cache_enabled:  # diffusers raises if one is on
            return enable(self, config, *args, **kwargs)
        return _enable(self, config)

    @functools.wraps(disable)
    def disable_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(getattr(self, "_cache_config", None), ClosedLoopConfig):
            return disable(self, *args, **kwargs)
        return _disable(self)

    setattr(enable_cache, _MARK, True)
    mixin.enable_cache, mixin.disable_cache = enable_cache, disable_cache


def _enable(transformer: Any, config: ClosedLoopConfig) -> None:
    """Accelerate a transformer by a config."""
    if (hook := find_hook(transformer)) is not None:
        there = f"{type(transformer).__name__} is accelerated already, by {hook.acceleration!r}"
        raise UnsupportedError(f"{there}: keep that, or call restore_pipeline(pipe) before enable_cache")
    accelerate_transformer(transformer, config.preset, **config.overrides).config = config
    set_cache_config(transformer, config)


def _disable(transformer: Any) -> None:
    """Undo :func:`_enable`, also if the hook on the transformer was removed."""
    if (hook := find_hook(transformer)) is not None:
        hook.acceleration.restore()
    set_cache_config(transformer, None)


if hasattr(diffusers, "CacheMixin"):
    _extend_cache_mixin(diffusers.CacheMixin)
