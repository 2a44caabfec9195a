"""The pipeline that calls a transformer, which several pipelines may share, and the clock of its schedulers."""

import sys
import weakref
from collections.abc import Iterator
from itertools import repeat
from operator import is_
from types import FrameType
from typing import Any

import torch

from dit_accel.loop.tracker import SchedulerClock
from dit_accel.models import denoisers
from dit_accel.models.wrappers import entry, parameters_of

BETWEEN = ("torch", "accelerate", "dit_accel")  # packages whose frames lie between a pipeline and its transformer


def calling_pipeline(transformer: torch.nn.Module) -> Any | None:
    """Return the pipeline that calls a transformer in this thread; None = a loop of the user's own calls it.

    diffusers does not pass the pipeline to a transformer. So this takes the nearest object above the call whose method
    is running and which has this transformer and a scheduler.
    """
    for owner in _callers():
        if hasattr(owner, "scheduler") and held_module(owner, transformer) is not None:
            return owner
    return None


def direct_caller(module: torch.nn.Module) -> Any | None:
    """Return the object whose method calls a method of this module; None = a function calls it.

    Unlike :func:`calling_pipeline` it finds no pipeline behind a callback of the user's.
    """
    return next((owner for owner in _callers() if owner is not module), None)


def _callers() -> Iterator[Any]:
    """Yield the object of each running method, from the innermost on, and None for a function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package, code = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code
        if package not in BETWEEN and code.co_name not in ("<listcomp>", "<genexpr>"):
            yield frame.f_locals.get("self") if code.co_argcount and code.co_varnames[0] == "self" else None
        frame = frame.f_back


def local_of(owner: Any, name: str) -> Any:
    """Return a variable of the nearest running method of an object, such as an argument of its call, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is owner and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


def held_module(owner: Any, transformer: torch.nn.Module) -> torch.nn.Module | None:
    """Return the transformer, or its wrapper from ``torch.compile``, that an object has; None = it has neither."""
    held = [*getattr(owner, "__dict__", {}).values()]
    if any(map(is_, held, repeat(transformer))):
        return transformer
    return next((found for item in held if (found := entry(item, transformer)) is not None), None)


def clock_of(pipe: weakref.ref) -> SchedulerClock:
    """Return a clock that reads a pipeline's schedulers and does not keep the pipeline alive."""
    return SchedulerClock(lambda: getattr(pipe(), "scheduler", None), lambda: _further_schedulers(pipe()))


def _further_schedulers(pipe: Any) -> dict[str, Any]:
    """Return the schedulers of further outputs by name: "audio" for ``audio_scheduler`` and ``audio_hidden_states``."""
    suffix = "_scheduler"
    inputs = {name for item in denoisers(pipe).values() for name in parameters_of(type(item))}
    named = {name.removesuffix(suffix): item for name, item in vars(pipe).items() if name.endswith(suffix)}
    return {part: item for part, item in named.items() if any(name.startswith(f"{part}_") for name in inputs)}
