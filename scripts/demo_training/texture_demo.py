"""Three more image demos, to test methods on models that they were not chosen on; none ships.

`TextureDemo` has demo-flux's size but different images: fine texture and sharp edges everywhere. `MixedDemo` is deeper
and wider, embeds a guidance scale and has scenes of both kinds. `CollageDemo` learns real images, which
`fetch_collage` fetches. All have shifts of about FLUX.1-dev's.
"""

from __future__ import annotations

import random
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
from .rendering import pack_pictures, render
from .scenes import Picture, Scene, describe, draw_picture, draw_scene, vocabulary
from .textures import (
    TexturePicture,
    TextureScene,
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

Mixed = Picture | TexturePicture


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


def draw_mixed_scene(rng: random.Random) -> Scene | TextureScene:
    """Choose a random scene of either kind, reserved or not."""
    return rng.choice((draw_scene, draw_texture_scene))(rng)


def describe_mixed(scene: Scene | TextureScene, rng: random.Random) -> str:
    """Write a prompt that describes all of `scene`."""
    return describe_texture(scene, rng) if isinstance(scene, TextureScene) else describe(scene, rng)


def draw_mixed(rng: random.Random, scene: Scene | TextureScene | None = None) -> Mixed:
    """Choose an image of `scene`, or of a random training scene of either kind."""
    is_texture = rng.random() < 0.5 if scene is None else isinstance(scene, TextureScene)
    return (draw_texture if is_texture else draw_picture)(rng, scene)


def pack_mixed(pictures: Sequence[Mixed]) -> torch.Tensor:
    """Pack the numbers of either kind after a number for the kind, padded to one length."""
    rows = []
    for picture in pictures:
        is_texture = isinstance(picture, TexturePicture)
        numbers = (pack_textures if is_texture else pack_pictures)([picture])[0]
        rows.append(torch.cat((torch.tensor([float(is_texture)]), numbers)))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def render_mixed(
    numbers: torch.Tensor, size: int, *, corner: torch.Tensor | None = None, extent: float = 1.0
) -> torch.Tensor:
    """Render images; arguments and result are those of `rendering.render`."""
    drawn = torch.empty(len(numbers), 3, size, size, device=numbers.device)
    for draw, is_texture in ((render, 0.0), (render_textures, 1.0)):
        rows = (numbers[:, 0] == is_texture).nonzero()[:, 0]
        if len(rows):
            corners = None if corner is None else corner[rows]
            drawn[rows] = draw(numbers[rows, 1:], size, corner=corners, extent=extent)
    return drawn


class MixedDemo(TextureDemo):
    """See `Demo`."""

    draw = staticmethod(draw_mixed)
    pack = staticmethod(pack_mixed)
    render = staticmethod(render_mixed)
    held_out = staticmethod(partial(held_out_prompts, draw=draw_mixed_scene, write=describe_mixed))
    words = sorted({*vocabulary(), *texture_vocabulary()})
    family = Flux((3, 8, 5), (0.5, 1.15), guidance=True)
    card = CARD.format(name="demo-mixed", paints="stickers over landscapes, and fine textures")


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
