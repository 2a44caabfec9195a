"""Time measurement of a pipeline's components other than its transformers: text encoders, autoencoders, vocoders, ….

It uses torch's own module hooks, which replace nothing: pipelines may share components, in any order of removal.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from dit_accel.loop.timing import REST, CallParts
from dit_accel.models import denoisers
from dit_accel.models.caller import local_of
from dit_accel.models.stand_in import StandIn
from dit_accel.models.wrappers import unwrapped

BEGINNINGS = ("check_inputs", "encode_prompt")  # first method that a pipeline calls; the second if it has no checks
END = "maybe_free_model_hooks"  # the last one
STATE = "state"  # variable of a modular pipeline's call
CODERS = ("encoder", "decoder")  # parts of an autoencoder; no pipeline calls the autoencoder's own forward
MUCH = 0.25  # share of a call's time


def time_components(pipe: Any, parts: CallParts) -> ExitStack:
    """Time each call of a pipeline and of its components until the returned stack is closed."""
    undo = ExitStack()
    for name, module in _components(pipe):
        enter, leave = partial(_eagerly, partial(parts.enter, name)), partial(_eagerly, parts.leave)
        undo.callback(module.register_forward_pre_hook(enter).remove)
        undo.callback(module.register_forward_hook(leave, always_call=True).remove)
    if (beginning := next((name for name in BEGINNINGS if hasattr(pipe, name)), None)) is not None:
        undo.callback(_watch(pipe, beginning, lambda: parts.begin(_device(pipe))))
    else:
        earlier, parts.notice = parts.notice, _Noticed(pipe, parts)
        undo.callback(setattr, parts, "notice", earlier)
    return undo


def release_at_end(pipe: Any) -> Callable[[], None]:
    """End each call for transformers without diffusers' cache interface, whose hooks diffusers does not reset."""

    def kept() -> list[Any]:
        return [item for item in map(unwrapped, denoisers(pipe).values()) if not hasattr(item, "_reset_stateful_cache")]

    def end() -> None:
        for transformer in kept():
            if hasattr(transformer, "_diffusers_hook"):
                transformer._diffusers_hook.reset_stateful_hooks()

    return _watch(pipe, END, end) if hasattr(pipe, END) and kept() else lambda: None


def autoencoder_remark(seconds: dict[str, float]) -> str | None:
    """Advice if the autoencoder took more than a quarter of a finished call, else None."""
    coders = sum(item for name, item in seconds.items() if name.rpartition(".")[2] in CODERS)
    share = coders / (sum(seconds.values()) or 1.0)
    if REST not in seconds or share <= MUCH:
        return None
    return (
        f"the autoencoder took {share:.0%} of the call; to make it faster, diffusers' docs compile it, pipe.vae.decode "
        "= torch.compile(pipe.vae.decode), and convert an image autoencoder to torch.channels_last; its tiling and "
        "slicing save memory, not time"
    )


def _components(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules to time, with names: also an autoencoder's parts, and a text encoder's inner model."""
    seen = list(denoisers(pipe).values())
    for name, component in vars(pipe).items():
        is_autoencoder = hasattr(component, "decode") and isinstance(getattr(component, "decoder", None), nn.Module)
        modules = [(f"{name}.{coder}", getattr(component, coder, None)) for coder in CODERS] if is_autoencoder else []
        for part, module in modules or [(name, component), (name, getattr(component, "base_model", None))]:
            inner = unwrapped(module)
            if isinstance(module, nn.Module) and not any(inner is item for item in seen):
                seen.append(inner)
                yield part, module


def _eagerly(notice: Callable[[], None], *_: Any) -> None:
    if not torch.compiler.is_compiling():  # time in compiled code counts as the rest of the call
        notice()


def _device(pipe: Any) -> torch.device:
    """Return the device of a pipeline's call; the pipeline itself looks for offload hooks on all modules, in 4 ms."""
    weights = (next(module.parameters(), None) for module in denoisers(pipe).values())
    device = next((item.device for item in weights if item is not None), torch.device("cpu"))
    return device if device.type == "cuda" else getattr(pipe, "_execution_device", torch.device("cpu"))


class _Noticed:
    """Begins a modular pipeline's call, which has no method to watch, when a part enters and the state is new."""

    def __init__(self, pipe: Any, parts: CallParts) -> None:
        self._pipe, self._parts = weakref.ref(pipe), parts
        self._latest: Callable[[], Any] = lambda: None

    def __call__(self) -> None:
        pipe = self._pipe()
        state = None if pipe is None else local_of(pipe, STATE)
        if type(state).__name__ == "PipelineState" and state is not self._latest():
            self._latest = weakref.ref(state)
            self._parts.begin(_device(pipe))


def _watch(pipe: Any, name: str, notice: Callable[[], None]) -> Callable[[], None]:
    """Call ``notice`` before each call of a pipeline's method; return a function that ends this.

    The stand-in, which a shallow copy of the pipeline has too, keeps the pipeline alive; the function does not.
    """

    def call(original: Callable, _: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        notice()
        return original(*args, **kwargs)

    stand_in = weakref.ref(update_wrapper(StandIn(pipe, name, call), getattr(pipe, name), updated=()))

    def undo() -> None:
        if (still := stand_in()) is not None:
            still.leave()

    return undo


def stop_watching_calls(pipe: Any) -> None:
    """Remove these stand-ins from a pipeline, or from a shallow copy of one."""
    for name in (*BEGINNINGS, END):
        if isinstance(stand_in := vars(pipe).get(name), StandIn):
            stand_in.leave(pipe)
