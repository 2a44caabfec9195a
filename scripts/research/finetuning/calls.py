"""Calls of a pipeline's transformer: data for training and evaluating a student, for any model family.

A teacher's calls come from its own runs, with the velocity that it returned. Calls for flow matching hold clean latents
instead; noise is added when they are used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from scripts.demo_training.family import SHIFT, Shape, VideoFamily
from scripts.demo_training.flow import draw_levels
from scripts.demo_training.training import Pace
from scripts.demo_training.video_demo import encode_clips

SHARED = ("txt_ids", "img_ids")  # arguments without a batch axis


@dataclass(frozen=True)
class Calls:
    """N calls of one sample each: arguments of the forward, `[N, ...]` except those in `SHARED`, and its output.

    Without `velocity`, `hidden_states` are clean latents.
    """

    arguments: dict[str, torch.Tensor]
    velocity: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.arguments["hidden_states"])

    def to(self, device: torch.device, dtype: torch.dtype) -> Calls:
        """Move the calls and cast float matrices; timesteps and guidance scales keep their precision."""

        def moved(values: torch.Tensor) -> torch.Tensor:
            return values.to(device, dtype if values.is_floating_point() and values.ndim > 1 else values.dtype)

        arguments = {name: moved(values) for name, values in self.arguments.items()}
        return Calls(arguments, None if self.velocity is None else moved(self.velocity))

    def rows(self, rows: torch.Tensor | slice) -> Calls:
        """Return some of the calls."""
        arguments = {name: values if name in SHARED else values[rows] for name, values in self.arguments.items()}
        return Calls(arguments, None if self.velocity is None else self.velocity[rows])


class CallRecorder:
    """Keeps a random ``share`` of each batch of the transformer's calls within a ``with`` block."""

    def __init__(self, transformer: nn.Module, share: float = 1.0, seed: int = 0) -> None:
        self._transformer = transformer
        self._share = share
        self._generator = torch.Generator().manual_seed(seed)
        self._kept: list[Calls] = []

    def __enter__(self) -> CallRecorder:
        self._handle = self._transformer.register_forward_hook(self._keep, with_kwargs=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._handle.remove()

    def _keep(self, transformer: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        call = Calls({name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}, output[0])
        rows = torch.randperm(len(call), generator=self._generator)[: math.ceil(len(call) * self._share)]
        self._kept.append(call.rows(rows.sort().values.to(output[0].device)))

    def calls(self) -> Calls:
        """Return all kept calls in the order in which they ran."""
        first = self._kept[0].arguments
        arguments = {
            name: first[name] if name in SHARED else torch.cat([kept.arguments[name] for kept in self._kept])
            for name in first
        }
        return Calls(arguments, torch.cat([kept.velocity for kept in self._kept]))


@torch.no_grad()
def record_calls(
    pipe: DiffusionPipeline, prompts: Sequence[str], call: dict[str, Any], *, share: float, batch: int, seed: int
) -> Calls:
    """Record a share of the transformer's calls in the pipeline for these prompts, without decoding.

    `call` has the arguments of the pipeline's call; `seed` is that of the noise and of the choice of kept calls.
    """
    with CallRecorder(pipe.transformer, share, seed) as recorder:
        for start in range(0, len(prompts), batch):
            chunk = list(prompts[start : start + batch])
            negative = {"negative_prompt": [call["negative_prompt"]] * len(chunk)} if "negative_prompt" in call else {}
            generator = torch.Generator("cpu").manual_seed(seed + start)
            pipe(prompt=chunk, generator=generator, output_type="latent", **{**call, **negative})
    return recorder.calls()


@torch.no_grad()
def clip_calls(
    family: VideoFamily,
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    numbers: torch.Tensor,
    call: dict[str, Any],
    *,
    batch: int = 16,
) -> Calls:
    """Make calls for flow matching on rendered videos of packed `numbers` [N, K]; `call` is as for `record_calls`."""
    unguided = {**call, "num_inference_steps": 1, family.guidance_argument: 1.0}
    calls = record_calls(pipe, prompts, unguided, share=1.0, batch=batch, seed=0)
    vae = copy.deepcopy(pipe.vae)  # encoding changes the layout of its weights
    pace = Pace("clips", math.inf, 1.0)
    shape = Shape(call["num_frames"], call["height"])
    latents = encode_clips(family, vae, numbers.to(pipe.device), pace, shape, batch)
    return replace(calls, arguments={**calls.arguments, "hidden_states": latents}, velocity=None)


def velocity_error(student: nn.Module, calls: Calls, generator: torch.Generator) -> torch.Tensor:
    """Mean squared error of the student's velocity: against the teacher's, or on noised clean latents."""
    arguments, target = dict(calls.arguments), calls.velocity
    if target is None:
        clean = arguments["hidden_states"].float()
        noise = torch.randn(clean.shape, device=clean.device, generator=generator)
        levels = draw_levels(len(clean), math.log(SHIFT), generator)
        noisy = torch.lerp(clean, noise, levels.view(-1, *[1] * (clean.ndim - 1)))
        arguments |= {"hidden_states": noisy.to(arguments["hidden_states"].dtype), "timestep": 1000 * levels}
        target = noise - clean
    return (student(**arguments, return_dict=False)[0].float() - target.float()).square().mean()
