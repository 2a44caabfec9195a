"""Times what a pipeline runs beside its transformers: text encoders, autoencoders, vocoders, whatever it has.

torch's own hooks do it, which replace nothing, so components may be shared and hooks come off in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from dit_accel.loop.call_parts import REST, CallParts
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


def _watch(pipe: Any, name: str, tell: Callable[[], None]) -> Callable[[], None]:
    """Has a method of the pipeline tell that it is called; returns what undoes that."""
    own = vars(pipe).get(name)

    @wraps(getattr(pipe, name))
    def watched(*args: Any, **kwargs: Any) -> Any:
        tell()
        if own is not None:
            return own(*args, **kwargs)
        return getattr(type(pipe), name)(pipe, *args, **kwargs)  # which may have been replaced since

    def undo() -> None:
        if vars(pipe).get(name) is watched:
            delattr(pipe, name)
            if own is not None:
                setattr(pipe, name, own)

    setattr(pipe, name, watched)
    return undo
