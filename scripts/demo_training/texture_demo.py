"""Two more image demos, to test methods on models that they were not chosen on; none ships.

`TextureDemo` has demo-flux's size but different images: fine texture and sharp edges everywhere. `CollageDemo` learns
real images, which `fetch_collage` fetches. Both have shifts of about FLUX.1-dev's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .collage import (
    collage_vocabulary,
    describe_collage,
    draw_collage,
    draw_collage_scene,
    pack_collages,
    render_collages,
)
from .flux import Flux
from .image_demo import ImageDemo
from .prompts import held_out_prompts
from .textures import (
    describe_texture,
    draw_texture,
    draw_texture_scene,
    pack_textures,
    render_textures,
    texture_vocabulary,
)

CARD = """---
license: apache-2.0
library_name: diffusers
---
# {name}

A FLUX pipeline of {{millions:.1f}} million transformer parameters, trained from scratch on images that
`scripts/demo_training/train.py` renders itself: {paints}. It knows {{words}} words. Pass
`max_sequence_length={{tokens}}`.
"""


def read_sharpness(pictures: torch.Tensor) -> list[float]:
    """Mean absolute difference of neighbouring pixels of each image [N, 3, H, W] in 0..1."""
    pictures = pictures.float()
    steps = pictures.diff(dim=-1).abs().mean(dim=(1, 2, 3)) + pictures.diff(dim=-2).abs().mean(dim=(1, 2, 3))
    return steps.tolist()


def mean_sharpness(readings: Sequence[float], scenes: Sequence[Any]) -> dict[str, float]:
    """Mean sharpness of images, for comparison with rendered ones."""
    return {"sharpness": round(sum(readings) / len(readings), 4)}


class TextureDemo(ImageDemo):
    """See `Demo`."""

    draw = staticmethod(draw_texture)
    pack = staticmethod(pack_textures)
    render = staticmethod(render_textures)
    held_out = staticmethod(partial(held_out_prompts, draw=draw_texture_scene, write=describe_texture))
    short_prompts = None
    read = staticmethod(read_sharpness)
    agreement = staticmethod(mean_sharpness)
    words = texture_vocabulary()
    family = Flux((2, 5, 4), (0.2, 0.8))
    card = CARD.format(name="demo-textures", paints="hatching, checks, grain, marble, fractals, and glyphs on them")


class CollageDemo(TextureDemo):
    """See `Demo`."""

    draw = staticmethod(draw_collage)
    pack = staticmethod(pack_collages)
    render = staticmethod(render_collages)
    held_out = staticmethod(partial(held_out_prompts, draw=draw_collage_scene, write=describe_collage))
    family = Flux((2, 5, 4), (0.5, 1.15), channels=(32, 64, 128, 192))
    card = CARD.format(name="demo-pictures", paints="emoji and photographed stamps over photographs")

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small)
        self.words = collage_vocabulary()
