"""Read objects from an image's pixels, and count how many attributes match the prompt.

Stickers are the vivid pixels (see `palette`), objects their connected components. An object's colour is the nearest of
the palette's under any light, its shape the best overlapping outline, its texture the share of dark marks.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import palette
from .rendering import FOLDS, sticker_distance, table_rows
from .scenes import COLOURS, PLACES, SHAPES, TIMES, Scene

READ_SIZE = 256  # side in pixels at which images are read
LEAST_AREA = 0.003  # share of the image; the smallest sticker covers 0.009


@dataclass(frozen=True)
class SeenObject:
    """An object as read: centre in image widths, y down."""

    x: float
    y: float
    colour: str
    shape: str
    texture: str


@dataclass(frozen=True)
class Reading:
    """Everything read from one image."""

    objects: tuple[SeenObject, ...]
    place: str
    time: str


def read_pictures(pictures: torch.Tensor) -> list[Reading]:
    """Read images [N, 3, H, W] in 0..1, on any device."""
    pictures = F.interpolate(pictures.float(), size=(READ_SIZE, READ_SIZE), mode="area")
    vivid = vivid_pixels(pictures)
    labels = _label_components(vivid).cpu()
    pictures, vivid = pictures.cpu(), vivid.cpu()
    return [_read_picture(*item) for item in zip(pictures, vivid, labels, strict=True)]


def vivid_pixels(pictures: torch.Tensor) -> torch.Tensor:
    """Mask of sticker pixels in images [N, 3, H, W] in 0..1: bool [N, H, W]."""
    brightest, darkest = pictures.amax(dim=1), pictures.amin(dim=1)
    chroma = brightest - darkest
    return (chroma > 0.345) & (chroma > 0.57 * brightest)


def agreement(readings: Sequence[Reading], scenes: Sequence[Scene]) -> dict[str, float]:
    """Fraction of images with each attribute of `_verdict` correct, and with all of them ("all")."""
    return shares([_verdict(reading, scene) for reading, scene in zip(readings, scenes, strict=True)])


def shares(verdicts: Sequence[dict[str, bool]]) -> dict[str, float]:
    """Fraction of verdicts that are true for each attribute, and for all of them ("all")."""
    table = {name: sum(verdict[name] for verdict in verdicts) / len(verdicts) for name in verdicts[0]}
    table["all"] = sum(all(verdict.values()) for verdict in verdicts) / len(verdicts)
    return {name: round(value, 4) for name, value in table.items()}


def _verdict(reading: Reading, scene: Scene) -> dict[str, bool]:
    seen = [[thing for thing in reading.objects if thing.colour == group.colour] for group in scene.groups]
    expected = sum(group.count for group in scene.groups)
    exact = [len(things) == group.count for things, group in zip(seen, scene.groups, strict=True)]
    pairs = [(thing, group) for things, group in zip(seen, scene.groups, strict=True) for thing in things]
    return {
        "colour": all(seen) and len(pairs) == len(reading.objects),
        "shape": all(seen) and all(thing.shape == group.shape for thing, group in pairs),
        "texture": all(seen) and all(thing.texture == group.texture for thing, group in pairs),
        "count": all(exact) and len(reading.objects) == expected,
        "position": all(seen) and _position_holds(scene, [_mean_centre(things) for things in seen]),
        "place": reading.place == scene.place,
        "time": reading.time == scene.time,
    }


def _position_holds(scene: Scene, centres: list[tuple[float, float]]) -> bool:
    x, y = centres[0]
    if scene.layout == "single":
        column = "left" if x < 0.38 else "right" if x > 0.62 else ""
        row = "top" if y < 0.38 else "bottom" if y > 0.62 else ""
        return (column + row or "centre") == scene.position
    if scene.layout == "trio":
        return x < centres[1][0] - 0.1 < centres[2][0] - 0.2
    other_x, other_y = centres[1]
    return {
        "above": y < other_y - 0.2,
        "below": y > other_y + 0.2,
        "left": x < other_x - 0.2,
        "right": x > other_x + 0.2,
    }[scene.layout]


def _mean_centre(things: list[SeenObject]) -> tuple[float, float]:
    return sum(thing.x for thing in things) / len(things), sum(thing.y for thing in things) / len(things)


def _label_components(mask: torch.Tensor) -> torch.Tensor:
    """Label connected components of bool [N, H, W]: int64 labels, equal within a component, 0 outside."""
    labels = torch.arange(1, mask[0].numel() + 1, device=mask.device).float().view_as(mask[0]) * mask
    while True:
        spread = labels
        for _ in range(16):
            spread = F.max_pool2d(spread[:, None], 3, stride=1, padding=1)[:, 0] * mask
        if torch.equal(spread, labels):
            return labels.long()
        labels = spread


def _read_picture(picture: torch.Tensor, vivid: torch.Tensor, labels: torch.Tensor) -> Reading:
    objects = []
    values, counts = labels[vivid].unique(return_counts=True)
    for value in values[counts > LEAST_AREA * READ_SIZE**2]:
        objects.append(_read_object(picture, labels == value))
    time, place = read_background(picture, vivid)
    return Reading(tuple(objects), place, time)


def _read_object(picture: torch.Tensor, mask: torch.Tensor) -> SeenObject:
    rows, columns = mask.nonzero().unbind(1)
    top, bottom, left, right = int(rows.min()), int(rows.max()) + 1, int(columns.min()), int(columns.max()) + 1
    pixels = picture[:, mask].T  # [P, 3]
    stickers = table_rows(palette.STICKER, COLOURS, picture)
    lights = torch.tensor((1.05, 0.95, 0.85, 0.74, 0.66))
    shades = (stickers[:, None] * lights[:, None]).clamp_max(1)  # [colours, lights, 3]
    nearest = torch.cdist(pixels, shades.flatten(0, 1)).argmin(dim=1)
    colour = (nearest // len(lights)).bincount(minlength=len(COLOURS)).argmax()

    height = (torch.arange(READ_SIZE)[:, None].expand_as(mask)[mask] - top) / (bottom - top)
    expected = stickers[colour].max() * (1.06 - 0.20 * height)
    marks = float((pixels.amax(dim=1) < 0.85 * expected).float().mean())
    texture = "plain" if marks < 0.08 else "dotted" if marks < 0.34 else "striped"

    crop = mask[top:bottom, left:right].float()
    outline = F.interpolate(crop[None, None], size=(_OUTLINE, _OUTLINE), mode="area")[0, 0] > 0.5
    overlaps = {
        shape: max(float((outline & other).sum() / (outline | other).sum()) for other in _outlines(shape))
        for shape in SHAPES
    }
    return SeenObject(
        x=(left + right) / 2 / READ_SIZE,
        y=(top + bottom) / 2 / READ_SIZE,
        colour=COLOURS[colour],
        shape=max(overlaps, key=overlaps.get),
        texture=texture,
    )


def read_background(picture: torch.Tensor, vivid: torch.Tensor) -> tuple[str, str]:
    """Read the time of day from the upper edge, and the place from the lower edge in that light.

    Takes an image [3, READ_SIZE, READ_SIZE] in 0..1 and its sticker mask, bool [READ_SIZE, READ_SIZE].
    """
    upper = picture[:, : READ_SIZE // 20].flatten(1).median(dim=1).values
    time = TIMES[int((table_rows(palette.SKY_TOP, TIMES, picture) - upper).norm(dim=1).argmin())]
    strip, covered = picture[:, -READ_SIZE // 24 :], vivid[-READ_SIZE // 24 :]
    lower = (strip if bool(covered.all()) else strip[:, ~covered]).flatten(1).median(dim=1).values
    tint = torch.tensor(palette.GROUND_TINT[time])
    grounds = table_rows(palette.GROUND_NEAR, PLACES, picture) * tint * 0.95
    return time, PLACES[int((grounds - lower).norm(dim=1).argmin())]


_OUTLINE = 48  # side in cells at which outlines are compared


@functools.cache
def _outlines(shape: str) -> list[torch.Tensor]:
    """The shape at three rotations, each cropped to its bounding box and rendered at _OUTLINE squared."""
    outlines = []
    axis = torch.linspace(-1.3, 1.3, 160)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    fold = table_rows(FOLDS, SHAPES, x)[SHAPES.index(shape)][None]
    for turn in torch.tensor((-0.12, 0.0, 0.12)):
        turned_x, turned_y = torch.cos(turn) * x + torch.sin(turn) * y, torch.cos(turn) * y - torch.sin(turn) * x
        inside = sticker_distance(turned_x[None], turned_y[None], torch.tensor([[[SHAPES.index(shape)]]]), fold)[0] < 0
        rows, columns = inside.nonzero().unbind(1)
        crop = inside[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].float()
        outlines.append(F.interpolate(crop[None, None], size=(_OUTLINE, _OUTLINE), mode="area")[0, 0] > 0.5)
    return outlines
