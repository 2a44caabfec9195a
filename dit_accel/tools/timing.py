"""What a pipeline's transformers take of a call's time, and hooks that are taken off again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dit_accel.loop.timing import gpu_stopwatch, stopwatch
from dit_accel.models import denoisers


def denoise(pipe: Any, arguments: dict[str, Any], seed: int, steps: int | None = None) -> torch.Tensor:
    """Latents after the first steps of a call; nothing is decoded.

    Args:
        arguments: of the pipeline's call, with its prompt.
        seed: of the noise, which is drawn on the CPU.
        steps: how many; None = all. Fewer need a pipeline that takes ``callback_on_step_end``.
    """

    def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pipe._interrupt = step + 1 >= steps
        return tensors

    own = {} if steps is None else {"callback_on_step_end": stop}
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipe(**arguments, **own, generator=generator, output_type="latent")[0]


@contextmanager
def removed_after(handles: Iterable[Any]) -> Iterator[None]:
    """Takes hooks off, by their handles, behind the ``with`` block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Clock:
    """Calls of the transformers, on the GPU's own clock where they run there, so that timing adds no wait."""

    def __init__(self, device: torch.device) -> None:
        self.calls = 0
        self._start = partial(gpu_stopwatch, device) if device.type == "cuda" else stopwatch
        self._inside: list[Callable[[], float]] = []
        self._stop_loop: Callable[[], Callable[[], float]] | None = None

    @property
    def seconds(self) -> float:
        """Inside the calls."""
        return sum(read() for read in self._inside)

    @property
    def loop_seconds(self) -> float:
        """From the start of the first call to the end of the last."""
        return self._loop()

    def enter(self, *_: Any) -> None:
        self._stop_loop = self._stop_loop or self._start()
        self._stop_call = self._start()

    def leave(self, *_: Any) -> None:
        self.calls += 1
        self._inside.append(self._stop_call())
        self._loop = self._stop_loop()


@contextmanager
def transformer_clock(pipe: Any) -> Iterator[_Clock]:
    """Times every call of the pipeline's transformers, whatever has replaced their forwards."""
    clock = _Clock(pipe._execution_device)
    modules = denoisers(pipe).values()
    handles = [module.register_forward_pre_hook(clock.enter) for module in modules]
    handles += [module.register_forward_hook(clock.leave) for module in modules]
    with removed_after(handles):
        yield clock
