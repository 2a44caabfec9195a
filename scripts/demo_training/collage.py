"""Collages: one or two emoji or photographed stamps, turned, over a random window of a photograph.

Photographs have noise and fine edges everywhere, and a prompt names the subject of a photograph but not the window.
`fetch_collage` packs the images into ARCHIVE.
"""

import io
import math
import random
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from .rendering import window_grid
from .scenes import Drawn, draw_training_scene

ARCHIVE = Path(__file__).parents[2] / "build" / "collage.zip"
SPRITE_SIDE = 128
PHOTOGRAPH_SIZE = (816, 544)  # width and height in pixels
DETAIL = 512  # images are rendered with at least so many pixels a side, and averaged down


@dataclass(frozen=True)
class CollageScene:
    """Content of a prompt: the names of the sprites, and the subject of the photograph."""

    names: tuple[str, ...]
    subject: str


@cache
def members(kind: str) -> dict[str, list[int]]:
    """Return the indices of the images of each name; `kind` is "sprites" or "photographs"."""
    found: dict[str, list[int]] = {}
    for index, member in enumerate(_listed(kind)):
        found.setdefault(member.split("/")[1], []).append(index)
    return found


@cache
def images(kind: str, device: torch.device) -> torch.Tensor:
    """Return all images, uint8 [N, channels, H, W]."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        decoded = [np.asarray(Image.open(io.BytesIO(archive.read(member)))) for member in _listed(kind)]
    return torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).contiguous().to(device)


def _listed(kind: str) -> list[str]:
    if not ARCHIVE.exists():
        raise FileNotFoundError(f"{ARCHIVE} is missing: python -m scripts.demo_training.fetch_collage makes it")
    with zipfile.ZipFile(ARCHIVE) as archive:
        return [name for name in archive.namelist() if name.startswith(kind)]


def draw_collage_scene(rng: random.Random) -> CollageScene:
    """Choose a random scene, reserved or not."""
    names = rng.sample(list(members("sprites")), rng.choice((1, 2)))
    return CollageScene(tuple(names), rng.choice(list(members("photographs"))))


def describe_collage(scene: CollageScene, rng: random.Random) -> str:
    """Write a prompt that describes all of `scene`."""
    named = (("an " if name[0] in "aeiou" else "a ") + name for name in scene.names)
    return f"{' and '.join(named)} over {scene.subject}"


def collage_vocabulary() -> list[str]:
    """List every word that a prompt can hold, sorted."""
    names = (*members("sprites"), *members("photographs"))
    return sorted({"a", "an", "and", "over", *(word for name in names for word in name.split())})


def draw_collage(rng: random.Random, scene: CollageScene | None = None) -> Drawn:
    """Choose a collage of `scene`, or of a random training scene; two sprites lie side by side as in the prompt."""
    scene = scene or draw_training_scene(rng, draw_collage_scene)
    side = rng.uniform(0.6, 1.0)  # of the window, in heights of the photograph
    aspect = PHOTOGRAPH_SIZE[0] / PHOTOGRAPH_SIZE[1]
    numbers = [rng.choice(members("photographs")[scene.subject]), rng.choice((-1, 1)), side]
    numbers += [rng.uniform(0, aspect - side), rng.uniform(0, 1 - side)]
    count = len(scene.names)
    for place, name in enumerate(scene.names):
        angle, radius = rng.gauss(0, 0.25), rng.uniform(0.17, 0.32) / math.sqrt(count)
        x = (place + rng.uniform(0.4, 0.6)) / count
        numbers += [rng.choice(members("sprites")[name]), x, rng.uniform(0.3, 0.7), radius]
        numbers += [math.cos(angle), math.sin(angle), rng.choice((-1, 1))]
    return Drawn(describe_collage(scene, rng), scene, tuple(numbers))


def pack_collages(collages: Sequence[Drawn]) -> torch.Tensor:
    """Pack the numbers for rendering, float32 [N, 19]:

    photograph, its mirroring, side, left and top of the window, and for two sprites (the second may have radius 0)
    index, x, y, radius, cos, sin and mirroring.
    """
    absent = (0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0)
    return torch.tensor([(*collage.numbers, *absent)[:19] for collage in collages], dtype=torch.float32)


def render_collages(
    numbers: torch.Tensor, size: int, *, corner: torch.Tensor | None = None, extent: float = 1.0
) -> torch.Tensor:
    """Render images; arguments and result are those of `rendering.render`."""
    corner = torch.zeros(len(numbers), 2, device=numbers.device) if corner is None else corner
    finer = max(1, round(DETAIL * extent / size))
    x, y = torch.broadcast_tensors(*window_grid(corner, size * finer, extent)[:2])
    photograph, mirror, side, left, top = (numbers[:, place, None, None] for place in range(5))
    width, height = PHOTOGRAPH_SIZE
    across = ((left + side * x) * (2 * height / width) - 1) * mirror
    canvas = _sampled("photographs", photograph, across, 2 * (top + side * y) - 1)
    for start in (5, 12):
        index, centre_x, centre_y, radius, cos, sin, mirror = (
            numbers[:, place, None, None] for place in range(start, start + 7)
        )
        right, down = (x - centre_x) / radius.clamp_min(1e-6), (y - centre_y) / radius.clamp_min(1e-6)
        sprite = _sampled("sprites", index, (cos * right + sin * down) * mirror, cos * down - sin * right)
        colour, coverage = sprite.split((3, 1), dim=1)
        canvas = torch.lerp(canvas, colour, coverage * (radius > 0)[:, None])
    return F.avg_pool2d(canvas, finer) * 2 - 1


def _sampled(kind: str, index: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sample one image for each row at coordinates in -1..1, float32 [N, channels, H, W] in 0..1; 0 outside."""
    chosen = images(kind, index.device)[index.flatten().long()].float() / 255
    return F.grid_sample(chosen, torch.stack((x, y), dim=-1), align_corners=False)
