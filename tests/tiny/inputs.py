"""Inputs of tiny pipelines."""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

TEXT_TOKENS = 37


def call_with(height: int, width: int, **arguments: Any) -> Callable[..., dict]:
    """A function that makes arguments of a call: its size in pixels, by default this, the number of tokens, and more.

    ``arguments`` are values, or functions of generator, height and width; None = the pipeline takes no such argument.
    """

    def inputs(generator: torch.Generator, *, height: int = height, width: int = width) -> dict:
        values = {"height": height, "width": width, "max_sequence_length": TEXT_TOKENS} | arguments
        output = {name: value(generator, height, width) if callable(value) else value for name, value in values.items()}
        return {name: value for name, value in output.items() if value is not None}

    return inputs


def random_tensor(generator: torch.Generator, height: int, width: int) -> torch.Tensor:
    """A random image `[1, 3, height, width]` in [0, 1]."""
    return torch.rand(1, 3, height, width, generator=generator)


def random_picture(generator: torch.Generator, height: int, width: int):
    """A PIL image of patches of 8×8 pixels in random colours, which stay distinct in an encoder's coarse view."""
    patches = torch.randint(256, (-(-height // 8), -(-width // 8), 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(patches.repeat_interleave(8, 0).repeat_interleave(8, 1)[:height, :width].numpy())


def left_half(generator: torch.Generator, height: int, width: int) -> torch.Tensor:
    """A mask `[1, 1, height, width]` of ones in the left half of the image, the part to inpaint."""
    mask = torch.zeros(1, 1, height, width)
    mask[..., : width // 2] = 1.0
    return mask
