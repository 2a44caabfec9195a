"""Coarse images of unfinished steps, from a linear map of latents to colours.

The map is fitted to finished outputs of the same model and size, so it needs neither the VAE nor constants of a model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from PIL import Image

PIXELS = 2  # along each side of a token
LONGEST_SIDE = 512  # pixels of an image
INTERVAL = 1.0  # seconds between previews: each waits for the step and copies its latents
UNEXPLAINED = 0.5  # share of the colours' variance; a fit with a larger error gives no preview
RIDGE = 1e-3  # of the squared latents


class Previewer:
    """Maps latents to coarse images; learns from finished outputs.

    Latents are ``[batch, channels, height, width]``, packed ``[batch, tokens, channels]``, or of a video with channels
    before or after frames, or last, if the pipeline's models tell their number. Other forms give no preview.
    """

    def __init__(self) -> None:
        self._weights: torch.Tensor | None = None  # [channels + 1, PIXELS * PIXELS * 3]
        self._size = (0, 0)  # width and height of images
        self._before: torch.Tensor | None = None
        self.latents: torch.Tensor | None = None  # after the latest step
        self.channels: int | None = None  # of a video's latents; None = unknown

    @property
    def has_learned(self) -> bool:
        return self._weights is not None

    def forget_latents(self) -> None:
        self._before = self.latents = None

    def learn(self, result: Image.Image | np.ndarray) -> None:
        """Fit the map to the latest latents and their output; without an image or uint8 video, there is no preview."""
        from PIL import Image

        self._weights, latents = None, self.latents
        self.forget_latents()
        if latents is None or not isinstance(result, Image.Image | np.ndarray):
            return
        image = result if isinstance(result, Image.Image) else Image.fromarray(result[len(result) // 2])
        scale = min(1.0, LONGEST_SIDE / max(image.size))
        self._size = (round(image.width * scale), round(image.height * scale))
        if (tokens := _tokens(latents, self._size, self.channels)) is None:
            return
        rows, columns, _ = tokens.shape
        small = image.convert("RGB").resize((columns * PIXELS, rows * PIXELS), Image.Resampling.BOX)
        colours = torch.from_numpy(np.array(small)).float().view(rows, PIXELS, columns, PIXELS, 3)
        target = colours.transpose(1, 2).reshape(rows * columns, -1)
        inputs = functional.pad(tokens.flatten(0, 1), (0, 1), value=1.0)
        gram = inputs.T @ inputs
        weights = torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram)), inputs.T @ target)
        missed = (inputs @ weights - target).square().mean() / target.var(0).mean().clamp_min(1e-6)
        self._weights = weights if missed < UNEXPLAINED else None

    def image(self, sigmas: tuple[float, float] | None = None) -> Image.Image | None:
        """Return the image that the latest latents lead to; None before a fit.

        With the noise levels before and after the latest step, the last two latents are extrapolated to no noise.
        """
        from PIL import Image

        if self._weights is None or self.latents is None:
            return None
        clean = self.latents.float()
        if sigmas is not None and self._before is not None and sigmas[0] != sigmas[1]:
            clean = clean + (clean - self._before.float()) * (sigmas[1] / (sigmas[0] - sigmas[1]))
        tokens = _tokens(clean, self._size, self.channels)
        if tokens is None or tokens.shape[2] + 1 != len(self._weights):
            return None
        rows, columns, _ = tokens.shape
        inputs = functional.pad(tokens.flatten(0, 1), (0, 1), value=1.0)
        colours = (inputs @ self._weights).clamp(0, 255).view(rows, columns, PIXELS, PIXELS, 3)
        pixels = colours.transpose(1, 2).reshape(rows * PIXELS, columns * PIXELS, 3)
        return Image.fromarray(pixels.byte().numpy()).resize(self._size, Image.Resampling.BICUBIC)

    def watch(
        self, show: Callable[[Image.Image], None] | None = None, is_due: Callable[[int], bool] | None = None
    ) -> Callable[..., dict[str, Any]]:
        """Return a callback that shows images at the end of steps that ``is_due`` accepts; None = one a second."""
        shown_at = time.monotonic()
        self.forget_latents()

        def callback(pipe: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            nonlocal shown_at
            latents = tensors.get("latents")
            latents = latents if isinstance(latents, torch.Tensor) else None
            self.channels = _latent_channels(pipe)
            has_same_shape = latents is not None and self.latents is not None and self.latents.shape == latents.shape
            self._before, self.latents = self.latents if has_same_shape else None, latents
            if show is not None and (is_due(index) if is_due else time.monotonic() - shown_at >= INTERVAL):
                if (image := self.image(_sigmas(pipe, index))) is not None:
                    show(image)
                shown_at = time.monotonic()
            return {}

        return callback


def _tokens(latents: torch.Tensor, size: tuple[int, int], channels: int | None) -> torch.Tensor | None:
    """Return latents of the first sample, of its middle frame, as float32 ``[rows, columns, channels]`` on the CPU;
    ``size`` is the width and height of an image of the same shape."""
    latents = latents.detach()[0]
    if latents.ndim == 2:
        rows = round(math.sqrt(len(latents) * size[1] / size[0]))
        if not rows or len(latents) % rows:
            return None
        latents = latents.view(rows, -1, latents.shape[-1])
    elif latents.ndim == 3:
        latents = latents.permute(1, 2, 0)
    elif latents.ndim == 4 and (frames := _frames(latents, size, channels)) is not None:
        latents = frames[len(frames) // 2]
    else:
        return None
    return latents.float().cpu()


def _frames(video: torch.Tensor, size: tuple[int, int], channels: int | None) -> torch.Tensor | None:
    """Return a video's latents as ``[frames, rows, columns, channels]``; None if its layout is not certain."""
    layouts = (video.movedim(axis, -1) for axis in (0, 1, 3))  # channels before frames, after frames, or last
    shaped = (frames for frames in layouts if frames.shape[1] == round(frames.shape[2] * size[1] / size[0]))
    fitting = [frames for frames in shaped if frames.shape[3] == channels]
    return fitting[0] if len(fitting) == 1 else None


def _latent_channels(pipe: Any) -> int | None:
    """Return the number of channels that the autoencoder, or else the transformer, has in its config."""
    for part, keys in (("vae", ("latent_channels", "z_dim")), ("transformer", ("in_channels",))):
        config = getattr(getattr(pipe, part, None), "config", None)
        for key in keys:
            if isinstance(channels := getattr(config, key, None), int):
                return channels
    return None


def _sigmas(pipe: Any, index: int) -> tuple[float, float] | None:
    """Return the noise levels before and after a step; None for a scheduler without them."""
    sigmas = getattr(getattr(pipe, "scheduler", None), "sigmas", None)
    if not isinstance(sigmas, torch.Tensor) or len(sigmas) <= index + 1:
        return None
    before, after = sigmas[index : index + 2].tolist()
    return before, after
