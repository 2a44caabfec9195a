"""Times what a pipeline runs beside its transformers: text encoders, autoencoders, vocoders, whatever it has.

torch's own hooks do it, which replace nothing, so components may be shared and hooks come off in any order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from dit_accel.loop.timing import REST, CallParts
from dit_accel.models import denoisers

BEGINNINGS = ("check_inputs", "encode_prompt")  # methods of a pipeline; the second of those that check nothing
CODERS = ("encoder", "decoder")  # of an autoencoder, whose own forward no pipeline calls
MUCH = 0.25  # of a call


def time_components(pipe: Any, parts: CallParts) -> ExitStack:
    """Has each call of a pipeline and of its components timed; closing what it returns ends that.

    What is compiled, hooks included, is not timed, and belongs to the rest of the call.
    """
    undo = ExitStack()
    for name, module in _components(pipe):
        undo.callback(module.register_forward_pre_hook(partial(_enter, parts, name)).remove)
        undo.callback(module.register_forward_hook(partial(_leave, parts), always_call=True).remove)
    beginning = next((name for name in BEGINNINGS if hasattr(pipe, name)), None)
    if beginning is not None:
        undo.callback(_watch(pipe, beginning, lambda: parts.begin(_device(pipe))))
    return undo


def autoencoder_remark(seconds: dict[str, float]) -> str | None:
    """What can be done about an autoencoder that takes much of a call that is over; None = it doesn't.

    Args:
        seconds: of the call, as :class:`CallParts` has them.
    """
    coders = sum(each for name, each in seconds.items() if name.rpartition(".")[2] in CODERS)
    share = coders / (sum(seconds.values()) or 1.0)
    if REST not in seconds or share <= MUCH:
        return None
    return (
        f"the autoencoder took {share:.0%} of the call; diffusers' docs compile it, pipe.vae.decode = "
        "torch.compile(pipe.vae.decode), and put one of images into torch.channels_last; its tiling and slicing save "
        "memory, not time"
    )


def _components(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules to time, each once, by the pipeline's name for it; of an autoencoder its encoder and its decoder."""
    seen = list(denoisers(pipe).values())
    for name, component in vars(pipe).items():
        is_autoencoder = hasattr(component, "decode") and isinstance(getattr(component, "decoder", None), nn.Module)
        modules = {f"{name}.{coder}": getattr(component, coder, None) for coder in CODERS} if is_autoencoder else {}
        for part, module in (modules or {name: component}).items():
            inner = getattr(module, "_orig_mod", module)
            if isinstance(module, nn.Module) and not any(inner is each for each in seen):
                seen.append(inner)
                yield part, module


def _enter(parts: CallParts, name: str, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        parts.enter(name)


def _leave(parts: CallParts, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        parts.leave()


def _device(pipe: Any) -> torch.device:
    return getattr(pipe, "_execution_device", torch.device("cpu"))


class _Watched:
    """Stands in for a method of a pipeline and tells that it is called. A shallow copy of the pipeline has it, too."""

    def __init__(self, pipe: Any, name: str, tell: Callable[[], None]) -> None:
        update_wrapper(self, getattr(pipe, name))
        self.pipe, self._name, self._tell = pipe, name, tell
        self.own = vars(pipe).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._tell()
        if self.own is not None:
            return self.own(*args, **kwargs)
        return getattr(type(self.pipe), self._name)(self.pipe, *args, **kwargs)  # which may have been replaced since

    def leave(self, pipe: Any) -> None:
        """Put back what the pipeline had, unless something else has taken this one's place."""
        if vars(pipe).get(self._name) is self:
            delattr(pipe, self._name)
            if self.own is not None:
                setattr(pipe, self._name, self.own)


def _watch(pipe: Any, name: str, tell: Callable[[], None]) -> Callable[[], None]:
    """Has a method of the pipeline tell that it is called; returns what undoes that and keeps no pipeline alive."""
    watched = _Watched(pipe, name, tell)
    setattr(pipe, name, watched)
    watched_by = weakref.ref(watched)

    def undo() -> None:
        if (still := watched_by()) is not None:
            still.leave(still.pipe)

    return undo


def stop_watching_calls(pipe: Any) -> None:
    """Take off what :func:`time_components` has put on a pipeline, or on the one that it is a shallow copy of."""
    for name in BEGINNINGS:
        if isinstance(watched := vars(pipe).get(name), _Watched):
            watched.leave(pipe)
