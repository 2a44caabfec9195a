"""Run and time a pipeline's call, with hooks that are removed afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dit_accel.loop.timing import CallParts, stopwatch_on
from dit_accel.models import denoisers
from dit_accel.models.component_times import time_components
from dit_accel.models.hooks import stateless
from dit_accel.pipeline import makes_video
from dit_accel.tools.media.video import as_clip

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


@dataclass(frozen=True)
class Output:
    """Results of one call, seconds of the whole call and of its denoising loop, and number of transformer calls.

    Results of video pipelines are uint8 ``[frames, height, width, 3]``. ``parts`` has the seconds of the other
    components, as in a report. ``sounds`` has the sound of each result, if the pipeline makes any.
    """

    results: list[Image.Image] | list[np.ndarray]
    seconds: float
    denoising_seconds: float
    calls: int
    parts: dict[str, float] = field(default_factory=dict)
    sounds: list[torch.Tensor] = field(default_factory=list)

    def sound(self, index: int) -> torch.Tensor | None:
        """Return the sound of a result; None if the pipeline made no sound."""
        return self.sounds[index] if self.sounds else None

    @property
    def stages(self) -> dict[str, float]:
        text = sum(seconds for name, seconds in self.parts.items() if name.startswith("text_encoder"))
        decoding = sum(seconds for name, seconds in self.parts.items() if name.endswith((".decoder", "vocoder")))
        stages = {"text encoding": text, "denoising": self.denoising_seconds, "decoding": decoding}
        return stages | {"other": max(self.seconds - sum(stages.values()), 0.0)}


def timed_output(pipe: Any, arguments: dict[str, Any], seed: int | Sequence[int]) -> Output:
    """Call the pipeline with noise from ``seed``; a batch takes a seed for each prompt, as calls of single prompts."""
    generator = _noise(seed) if isinstance(seed, int) else list(map(_noise, seed))
    video = makes_video(pipe)
    form = {"output_type": "np"} if video else {}
    parts = CallParts()
    with transformer_clock(pipe) as clock, time_components(pipe, parts):
        started = time.perf_counter()
        output = pipe(**arguments, **form, generator=generator)
        seconds = time.perf_counter() - started
    results = [as_clip(frames) for frames in _batch(output)] if video else output.images
    return Output(results, seconds, clock.loop_seconds, clock.calls, parts.seconds(), sounds_of(output))


def _noise(seed: int) -> torch.Generator:
    """Return the source of a run's noise, which is drawn on the CPU, so that it is equal on all devices."""
    return torch.Generator("cpu").manual_seed(seed)


def run_pipeline(pipe: Any, arguments: dict[str, Any], prompt: str, seed: int) -> dict[str, torch.Tensor]:
    """Return a call's final ``latents`` and its ``frames`` ``[frames, 3, height, width]``, float32 on the CPU.

    Only the first image or video of a batch is returned. An image is one frame; values are in 0..1. If the pipeline
    makes sound, ``sound`` has it, as in :func:`sounds_of`; if it makes sound alone, there are no ``frames``.
    """
    latents: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents[:] = [tensors["latents"]]
        return tensors

    output = pipe(**arguments, prompt=prompt, generator=_noise(seed), output_type="pt", callback_on_step_end=keep)
    results = {"latents": latents[0].float().cpu()}
    if not hasattr(output, "audios"):
        frames = _batch(output)[0].float().cpu()
        results["frames"] = frames.view(-1, *frames.shape[-3:])
    return results | ({"sound": sounds[0]} if (sounds := sounds_of(output)) else {})


def sounds_of(output: Any) -> list[torch.Tensor]:
    """Return the sound of each result, if any: float32 ``[samples]`` or ``[channels, samples]`` on the CPU."""
    sounds = getattr(output, "audios", getattr(output, "audio", None))  # the former: sound alone
    if (sound := getattr(output, "sound", None)) is not None:  # Cosmos 3 has no batch
        sounds = [sound]
    return [] if sounds is None else [torch.as_tensor(sound).float().cpu() for sound in sounds]


def _batch(output: Any) -> Any:
    """Return the images or videos of a call; Cosmos 3 returns one video without a batch."""
    return [output.video] if hasattr(output, "video") else output[0]


def denoise(pipe: Any, arguments: dict[str, Any], seed: int, steps: int | None = None) -> torch.Tensor:
    """Return the latents after the first steps of a call that takes ``callback_on_step_end``; None = all steps."""

    def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pipe._interrupt = step + 1 >= steps
        return tensors

    callback = {} if steps is None else {"callback_on_step_end": stop}
    return pipe(**arguments, **callback, generator=_noise(seed), output_type="latent")[0]


@contextmanager
def removed_after(handles: Iterable[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Clock:
    """Timer of transformer calls; on a GPU it uses CUDA events, so that timing adds no synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.calls = 0
        self._start = partial(stopwatch_on, device)
        self._inside: list[Callable[[], float]] = []
        self._stop_loop: Callable[[], Callable[[], float]] | None = None

    @property
    def seconds(self) -> float:
        return sum(read() for read in self._inside)

    @property
    def loop_seconds(self) -> float:
        """Time from the start of the first call to the end of the last."""
        return self._loop()

    @stateless
    def enter(self, *_: Any) -> None:
        self._stop_loop = self._stop_loop or self._start()
        self._stop_call = self._start()

    @stateless
    def leave(self, *_: Any) -> None:
        self.calls += 1
        self._inside.append(self._stop_call())
        self._loop = self._stop_loop()


@contextmanager
def transformer_clock(pipe: Any) -> Iterator[_Clock]:
    """Time every call of the pipeline's transformers, even if their forward was replaced."""
    clock = _Clock(pipe._execution_device)
    modules = denoisers(pipe).values()
    handles = [module.register_forward_pre_hook(clock.enter) for module in modules]
    handles += [module.register_forward_hook(clock.leave) for module in modules]
    with removed_after(handles):
        yield clock
