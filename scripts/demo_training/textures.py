"""Images of only fine texture and sharp edges: hatching, checks, grain, marble, fractals, and glyphs on them.

Details outside the prompt (phases, the grain itself, the letters) are random for each image and determine most of its
pixels, so a model's outputs follow no low polynomial in the noise level.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import palette
from .rendering import window_grid
from .scenes import COLOURS, Drawn, draw_training_scene

PATTERNS = ("hatching", "crosshatching", "checks", "rings", "grain", "marble", "fractal")
SCALES = {"fine": 26.0, "medium": 15.0, "coarse": 8.0}  # periods over the image's width
WRITINGS = {"": 0, "letters": 1, "digits": 2}
# Rows of five pixels from top to bottom; the leftmost pixel is the highest bit.
GLYPHS = {
    "letters": "0e11111f111111 1e11111e11111e 0e11101010110e 1f10101e10101f 11121418141211 111b1515111111",
    "digits": "0e11131519110e 040c040404040e 0e11010204081f 1f02040201110e 02060a121f0202 1f101e0101110e",
}


@dataclass(frozen=True)
class TextureScene:
    """Content of a prompt: `writing` is one of WRITINGS; the colours are of pattern, ground and writing."""

    pattern: str
    scale: str
    colours: tuple[str, str, str]
    writing: str


def draw_texture_scene(rng: random.Random) -> TextureScene:
    """Choose a random scene, reserved or not."""
    first, second, third = rng.sample(COLOURS, 3)
    return TextureScene(
        rng.choice(PATTERNS), rng.choice(tuple(SCALES)), (first, second, third), rng.choice(tuple(WRITINGS))
    )


def describe_texture(scene: TextureScene, rng: random.Random) -> str:
    """Write a prompt that describes all of `scene`."""
    pattern, ground, ink = scene.colours
    text = f"{scene.scale} {pattern} {scene.pattern} on {ground}"
    return f"{text} with {ink} {scene.writing}" if scene.writing else text


def draw_texture(rng: random.Random, scene: TextureScene | None = None) -> Drawn:
    """Choose an image of `scene`, or of a random training scene."""
    scene = scene or draw_training_scene(rng, draw_texture_scene)
    return Drawn(describe_texture(scene, rng), scene, tuple(rng.random() for _ in range(5)))


def texture_vocabulary() -> list[str]:
    """List every word that a prompt can hold, sorted."""
    return sorted({*PATTERNS, *SCALES, *COLOURS, *WRITINGS, "on", "with"} - {""})


def pack_textures(pictures: Sequence[Drawn]) -> torch.Tensor:
    """Pack the numbers for rendering, float32 [N, 11]:

    pattern, writing, periods, angle, two phases, seed, columns of glyphs, and the three colours.
    """
    rows = []
    for picture in pictures:
        scene, (angle, across, down, seed, columns) = picture.scene, picture.numbers
        row = [PATTERNS.index(scene.pattern), WRITINGS[scene.writing], SCALES[scene.scale] * (0.9 + 0.2 * across)]
        row += [math.pi * angle, across, down, 1 + 97 * seed, 5 + int(5 * columns)]
        rows.append(row + [COLOURS.index(colour) for colour in scene.colours])
    return torch.tensor(rows, dtype=torch.float32)


def render_textures(
    numbers: torch.Tensor, size: int, *, corner: torch.Tensor | None = None, extent: float = 1.0
) -> torch.Tensor:
    """Render images; arguments and result are those of `rendering.render`."""
    corner = torch.zeros(len(numbers), 2, device=numbers.device) if corner is None else corner
    x, y, _ = window_grid(corner, size, extent)
    x, y = torch.broadcast_tensors(x, y)
    colours = torch.tensor([palette.STICKER[name] for name in COLOURS], device=numbers.device)
    pattern, ground, ink = (colours[numbers[:, place].long()][:, :, None, None] for place in (8, 9, 10))
    amount = torch.empty_like(x)
    for index in range(len(PATTERNS)):
        rows = (numbers[:, 0] == index).nonzero()[:, 0]
        if len(rows):
            amount[rows] = _amount(PATTERNS[index], x[rows], y[rows], numbers[rows])
    canvas = torch.lerp(ground.expand(-1, -1, size, size), pattern, amount.clamp(0, 1)[:, None])
    return torch.lerp(canvas, ink, _written(numbers, x, y)[:, None]).clamp(0, 1) * 2 - 1


def _amount(name: str, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Share of the pattern's colour at each pixel, about 0..1."""
    periods, angle, across, down, seed = numbers[:, 2:7, None, None].unbind(1)
    along = (x * torch.cos(angle) + y * torch.sin(angle)) * periods + across
    beside = (y * torch.cos(angle) - x * torch.sin(angle)) * periods + down

    def edge(wave: torch.Tensor) -> torch.Tensor:
        return (0.5 + 2.5 * wave).clamp(0, 1)

    def wave(position: torch.Tensor) -> torch.Tensor:
        return torch.sin(2 * math.pi * position)

    if name == "hatching":
        return edge(wave(along))
    if name == "crosshatching":
        return torch.maximum(edge(wave(along) - 0.5), edge(wave(beside) - 0.5))
    if name == "checks":
        return edge(wave(along) * wave(beside))
    if name == "rings":
        centre_x, centre_y = 0.2 + 0.6 * across, 0.2 + 0.6 * down
        return edge(wave(torch.sqrt((x - centre_x) ** 2 + (y - centre_y) ** 2) * periods))
    if name == "grain":
        return edge(_noise(x * periods, y * periods, seed) - 0.5)
    if name == "marble":
        return edge(wave(along / 3 + 1.5 * _noise(x * periods / 4, y * periods / 4, seed)))
    return _julia(x, y, periods, angle)


def _noise(x: torch.Tensor, y: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Value noise of three octaves in 0..1."""
    total = torch.zeros_like(x)
    for octave, share in enumerate((0.5, 0.3, 0.2)):
        u, v = x * 2**octave, y * 2**octave
        left, top = u.floor(), v.floor()
        right_share, low_share = (u - left).square() * (3 - 2 * (u - left)), (v - top).square() * (3 - 2 * (v - top))
        upper = torch.lerp(_hash(left, top, seed), _hash(left + 1, top, seed), right_share)
        lower = torch.lerp(_hash(left, top + 1, seed), _hash(left + 1, top + 1, seed), right_share)
        total += share * torch.lerp(upper, lower, low_share)
    return total


def _hash(column: torch.Tensor, row: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Pseudorandom number in 0..1 for each cell."""
    return torch.remainder(torch.sin(column * 12.9898 + row * 78.233 + seed) * 43758.5453, 1.0)


def _julia(x: torch.Tensor, y: torch.Tensor, periods: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Bands of escape time of a Julia set whose constant runs along a circle."""
    width = 1.0 + 15.0 / periods
    real, imaginary = (x - 0.5) * width, (y - 0.5) * width
    constant_real, constant_imaginary = 0.7885 * torch.cos(2 * angle), 0.7885 * torch.sin(2 * angle)
    count = torch.zeros_like(x)
    for _ in range(24):
        real, imaginary = real * real - imaginary * imaginary + constant_real, 2 * real * imaginary + constant_imaginary
        inside = real * real + imaginary * imaginary < 16
        count += inside
        real, imaginary = real.clamp(-9, 9), imaginary.clamp(-9, 9)
    return 0.5 + 0.5 * torch.cos(0.8 * count)


def _written(numbers: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mask of glyphs in a grid; the seed of each cell chooses its glyph."""
    writing, seed, columns = (numbers[:, place, None, None] for place in (1, 6, 7))
    left, top = (x * columns).floor(), (y * columns).floor()
    across, down = ((x * columns - left) * 8 - 1.5).floor(), ((y * columns - top) * 9 - 1).floor()
    choice = (_hash(left, top, seed + 5) * 6).floor().clamp(0, 5)
    glyphs = [bytes.fromhex(glyph) for rows in GLYPHS.values() for glyph in rows.split()]
    bits = torch.tensor([[row >> (4 - column) & 1 for row in glyph for column in range(5)] for glyph in glyphs])
    place = down.clamp(0, 6) * 5 + across.clamp(0, 4)
    which = (writing.clamp_min(1) - 1) * 6 + choice
    seen = bits.to(numbers).flatten()[(which * 35 + place).long()]
    on_glyph = (across >= 0) & (across < 5) & (down >= 0) & (down < 7) & (writing > 0)
    return seen * on_glyph
