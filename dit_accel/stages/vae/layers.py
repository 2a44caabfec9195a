"""Layers of decoders with fused kernels, on features in channels-last layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dit_accel.kernels import convolution, fold_upsampling, upsampled_convolution

LAST = torch.channels_last_3d


class Layers:
    """Layers of one decode, which converts each weight once.

    Args:
        backend: of the kernels.
    """

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend
        self._convolutions = "reference" if backend == "reference" else "auto"  # small channels are cuDNN's
        self._converted: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def convolved(
        self,
        layer: nn.Conv2d | nn.Conv3d,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        padding: int = 1,
        biased: bool = True,
        last_tap: bool = False,
    ) -> torch.Tensor:
        """Convolve ``[B, C, T, H, W]``, whose frames are padded, and add a residual.

        Args:
            padding: zeros on each side of the rows and columns.
            biased: add the layer's bias.
            last_tap: only the kernel's last tap over time, because all frames before are zeros.
        """
        weight = self.converted(layer.weight, _last_tap if last_tap else _dense)
        bias = layer.bias if biased else None
        return convolution(x, weight, bias, residual, padding=padding, backend=self._convolutions)

    def upsampled(
        self, layer: nn.Conv2d | nn.Conv3d, x: torch.Tensor, *, frames: bool = False, padding: int = 1
    ) -> torch.Tensor:
        """Convolve features that are twice as wide and high, and have twice the frames after the first with frames."""
        weight = self.converted(layer.weight, _folded_frames if frames else _folded)
        return upsampled_convolution(x, weight, layer.bias, padding=padding, backend=self._convolutions)

    def converted(self, weight: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the weight in another layout, converted once a decode."""
        key = (id(weight), convert)
        if key not in self._converted:
            self._converted[key] = weight, convert(weight)  # the weight too, so that its id stays its own
        return self._converted[key][1]


def _with_time(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.ndim == 5 else weight[:, :, None]


def _dense(weight: torch.Tensor) -> torch.Tensor:
    return _with_time(weight).contiguous(memory_format=LAST)


def _last_tap(weight: torch.Tensor) -> torch.Tensor:
    return weight[:, :, -1:].contiguous(memory_format=LAST)


def _folded(weight: torch.Tensor) -> torch.Tensor:
    return fold_upsampling(_with_time(weight))


def _folded_frames(weight: torch.Tensor) -> torch.Tensor:
    return fold_upsampling(weight, frames=True)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``[B, C, T, H, W]`` in channels-last layout."""
    return x.contiguous(memory_format=LAST)


def as_images(x: torch.Tensor) -> torch.Tensor:
    """Return ``[B, C, T, H, W]`` as ``[B T, C, H, W]``, in channels-last layout."""
    return dense(x).permute(0, 2, 1, 3, 4).flatten(0, 1)


def as_video(images: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``[B T, C, H, W]`` as ``[B, C, T, H, W]``, with the frames of ``like``."""
    return images.unflatten(0, (like.shape[0], like.shape[2])).permute(0, 2, 1, 3, 4)


def parts_of(stage: Any, single: str, several: str) -> list[nn.Module]:
    """Return the modules of a stage, which has one, a list of them, or none."""
    one = getattr(stage, single, None)
    return [one] if one is not None else list(getattr(stage, several, None) or ())
