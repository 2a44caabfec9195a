"""Read objects and motions from a video's pixels, and count how many attributes match the prompt.

Stickers are the vivid pixels (see `palette`). Every sticker in a video has its own colour, so an object is all vivid
pixels nearest to one hue; only the hue counts, because light, shadow and gloss change the rest. Shape and angle are
those of the best overlapping outline among all shapes and angles; the motion follows from centre and angle.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import palette
from .clip_prompts import COLOURS, SHAPES, ClipScene
from .motion import BOUNCES, DIAGONAL, STRAIGHT, TURN
from .reading import READ_SIZE, read_background, shares, vivid_pixels
from .rendering import FOLDS, sticker_distance, table_rows
from .scenes import SHAPES as ALL_SHAPES

CLIP_SIZE = 128  # side in pixels at which everything but the landscape is read
LEAST_AREA = 0.006  # share of the frame; the smallest star has 0.026
AREA_CHANGE = 0.15  # of an object that stays whole, relative to its first area
LEAST_MOVE = 0.12  # minimum path of a moving object in frame widths; a walk is 0.24
LEAST_TURN = TURN / 2
LEAST_PAN = 0.12  # frame widths; a pan is 0.3

_CELLS = 40  # side of the crops in which outlines are compared
_REACH = 1.7  # half of a crop's side, in radii of the disc with the object's area; a star's points reach 1.5
_ANGLES = 72  # number of rendered angles per outline
_SYMMETRY = {"circle": math.inf, "square": 4, "triangle": 3, "star": 5, "heart": 1}  # repetitions within a full turn


@dataclass(frozen=True)
class SeenActor:
    """An object as read: mean centre in frame widths, y down; `motion` is "" if none of `clip_prompts.MOTIONS` fits.

    `whole`: in every frame it is one piece, whose area is within AREA_CHANGE of the first frame's.
    """

    shape: str
    colour: str
    motion: str
    x: float
    y: float
    whole: bool


@dataclass(frozen=True)
class ClipReading:
    """Everything read from one video; `scraps`: in some frame there is an object that is not among the actors."""

    actors: tuple[SeenActor, ...]
    place: str
    camera: str
    scraps: bool


def read_clips(clips: torch.Tensor) -> list[ClipReading]:
    """Read videos [N, 3, F, H, W] in 0..1, on any device."""
    return [_read_clip(clip) for clip in clips]


def agreement(readings: Sequence[ClipReading], scenes: Sequence[ClipScene]) -> dict[str, float]:
    """Fraction of videos with each attribute of `_verdict` correct, and with all of them ("all")."""
    return shares([_verdict(reading, scene) for reading, scene in zip(readings, scenes, strict=True)])


def _verdict(reading: ClipReading, scene: ClipScene) -> dict[str, bool]:
    by_colour = {seen.colour: seen for seen in reading.actors}
    pairs = [(by_colour[actor.colour], actor) for actor in scene.actors if actor.colour in by_colour]
    found = len(pairs) == len(scene.actors)
    lower = pairs[0][0].y - pairs[-1][0].y if found else 0.0  # the first object, than the second
    return {
        "shape": found and all(seen.shape == actor.shape for seen, actor in pairs),
        "colour": found and len(reading.actors) == len(pairs),
        "motion": found and all(seen.motion == actor.motion for seen, actor in pairs),
        "whole": found and not reading.scraps and all(seen.whole for seen, _ in pairs),
        "relation": found and {"single": True, "above": lower < -0.2, "below": lower > 0.2}[scene.layout],
        "place": reading.place == scene.place,
        "camera": reading.camera == scene.camera,
    }


def _read_clip(clip: torch.Tensor) -> ClipReading:
    frames = _resize(clip.float().transpose(0, 1), CLIP_SIZE)  # [F, 3, H, W]
    vivid = vivid_pixels(frames)
    hues = _nearest_hues(frames)
    of_colour = torch.stack([vivid & (hues == index) for index in range(len(COLOURS))], dim=1).float()
    masks = F.avg_pool2d(of_colour, 5, stride=1, padding=2) > 0.5  # [F, colours, H, W]; removes specks and gaps
    areas = masks.float().mean(dim=(2, 3))  # [F, colours]
    lasting = (areas.mean(dim=0) > LEAST_AREA).tolist()
    actors = tuple(_read_actor(masks[:, index], COLOURS[index]) for index, lasts in enumerate(lasting) if lasts)
    brief = (areas.amax(dim=0) > LEAST_AREA).sum() > sum(lasting)
    first = _resize(frames[:1], READ_SIZE).cpu()
    place = read_background(first[0], vivid_pixels(first)[0])[1]
    return ClipReading(actors, place, _read_camera(frames, vivid), scraps=bool(brief))


def _resize(frames: torch.Tensor, size: int) -> torch.Tensor:
    return F.interpolate(frames, size=(size, size), mode="area")


def _nearest_hues(frames: torch.Tensor) -> torch.Tensor:
    """Index into COLOURS of the nearest hue for each pixel of [F, 3, H, W]: int64 [F, H, W]."""
    stickers = _hue(table_rows(palette.STICKER, COLOURS, frames).T[None])[0].T  # [colours, 3]
    hues = _hue(frames.flatten(2))  # [F, 3, P]
    similarity = stickers @ hues - stickers.square().sum(dim=1, keepdim=True) / 2  # nearest is largest
    return similarity.argmax(dim=1).view(len(frames), *frames.shape[2:])


def _hue(pixels: torch.Tensor) -> torch.Tensor:
    """Scale and shift pixels [B, 3, P] to the range 0..1, so that light and gloss do not matter."""
    darkest = pixels.amin(dim=1, keepdim=True)
    return (pixels - darkest) / (pixels.amax(dim=1, keepdim=True) - darkest + 1e-6)


def _read_actor(mask: torch.Tensor, colour: str) -> SeenActor:
    """Read the object of a mask [F, H, W]."""
    weights = mask.float()
    areas = weights.mean(dim=(1, 2))
    steps = (torch.arange(CLIP_SIZE, device=mask.device) + 0.5) / CLIP_SIZE
    pixels = weights.sum(dim=(1, 2)).clamp_min(1)
    x, y = weights.sum(dim=1) @ steps / pixels, weights.sum(dim=2) @ steps / pixels  # [F]
    seen, whole = areas > 0.4 * areas.amax(), areas > 0.9 * areas.amax()
    overlaps = _overlaps(weights[whole], x[whole], y[whole], areas[whole])  # [F', shapes, angles]
    best, angles = overlaps.max(dim=2)
    shape = int(best.mean(dim=0).argmax())
    turned = _turned(angles[:, shape] * (2 * math.pi / _ANGLES), _SYMMETRY[SHAPES[shape]])
    return SeenActor(
        shape=SHAPES[shape],
        colour=colour,
        motion=_name_motion(x[seen], y[seen], turned),
        x=float(x[seen].mean()),
        y=float(y[seen].mean()),
        whole=bool(((areas / areas[0] - 1).abs() < AREA_CHANGE).all()) and _in_one_piece(mask),
    )


def _in_one_piece(mask: torch.Tensor) -> bool:
    """Return True if in every frame of [F, H, W] all pixels but specks of 2% hang together."""
    inside = mask[:, None].float()
    reached = F.one_hot(inside.flatten(1).argmax(dim=1), mask[0].numel()).view_as(inside) * inside
    while True:
        grown = reached
        for _ in range(8):
            grown = F.max_pool2d(grown, 3, stride=1, padding=1) * inside
        if torch.equal(grown, reached):
            return bool((reached.sum(dim=(1, 2, 3)) >= 0.98 * inside.sum(dim=(1, 2, 3))).all())
        reached = grown


def _name_motion(x: torch.Tensor, y: torch.Tensor, turned: float) -> str:
    """Name the motion of an object whose centre follows x and y [F]; "" if no motion fits."""
    ranges = [float(line.amax() - line.amin()) for line in (x, y)]
    nets = [float(line[-1] - line[0]) for line in (x, y)]
    moves = tuple(reach > LEAST_MOVE for reach in ranges)
    returns = [abs(net) < reach / 2 for net, reach in zip(nets, ranges, strict=True)]
    if not any(moves):
        return "turns" if turned > LEAST_TURN else "rests"
    if any(move and back for move, back in zip(moves, returns, strict=True)):
        known, direction = BOUNCES, tuple(int(move) for move in moves)
    else:
        signs = (int(math.copysign(1, net)) for net in nets)
        known, direction = {**STRAIGHT, **DIAGONAL}, tuple(move * sign for move, sign in zip(moves, signs, strict=True))
    return next((name for name, heading in known.items() if heading == direction), "")


def _turned(angles: torch.Tensor, symmetry: float) -> float:
    """Clockwise rotation in radians from the first to the last of angles [F], taking the shortest way at each step."""
    if math.isinf(symmetry) or len(angles) < 2:
        return 0.0
    period = 2 * math.pi / symmetry
    steps = torch.remainder(angles.diff() + period / 2, period) - period / 2
    return float(steps.sum())


def _overlaps(masks: torch.Tensor, x: torch.Tensor, y: torch.Tensor, areas: torch.Tensor) -> torch.Tensor:
    """Intersection over union of each outline with each mask [F, H, W]: [F, shapes, angles]."""
    outlines = _outlines().to(masks.device)
    crops = (_crop(masks, x, y, areas) > 0.5).float().flatten(1)
    shared = crops @ outlines.flatten(0, 1).T
    joint = crops.sum(dim=1, keepdim=True) + outlines.flatten(0, 1).sum(dim=1) - shared
    return (shared / joint).unflatten(1, outlines.shape[:2])


def _crop(masks: torch.Tensor, x: torch.Tensor, y: torch.Tensor, areas: torch.Tensor) -> torch.Tensor:
    """Crop windows [F, _CELLS, _CELLS] around the centres x and y, sized by the areas, all [F] in frame widths."""
    scale, zero = 2 * _REACH * torch.sqrt(areas / math.pi), torch.zeros_like(x)
    rows = torch.stack((scale, zero, 2 * x - 1, zero, scale, 2 * y - 1), dim=1).unflatten(1, (2, 3))
    grid = F.affine_grid(rows, [len(masks), 1, _CELLS, _CELLS], align_corners=False)
    return F.grid_sample(masks[:, None], grid, align_corners=False)[:, 0]


@functools.cache
def _outlines() -> torch.Tensor:
    """Every shape at every angle as `_crop` would return it: float32 [shapes, angles, _CELLS * _CELLS], 0 or 1."""
    axis = (torch.arange(CLIP_SIZE) + 0.5) / CLIP_SIZE * 4 - 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    turns = torch.arange(_ANGLES)[:, None, None] * (2 * math.pi / _ANGLES)
    turned_x, turned_y = turns.cos() * x + turns.sin() * y, turns.cos() * y - turns.sin() * x
    drawn = []
    for name in SHAPES:
        fold = table_rows(FOLDS, [name], x).expand(_ANGLES, -1)
        index = torch.full((1, 1, 1), ALL_SHAPES.index(name))
        inside = (sticker_distance(turned_x, turned_y, index, fold) < 0).float()
        steps, pixels = (axis + 2) / 4, inside.sum(dim=(1, 2))
        centre_x, centre_y = inside.sum(dim=1) @ steps / pixels, inside.sum(dim=2) @ steps / pixels
        drawn.append((_crop(inside, centre_x, centre_y, inside.mean(dim=(1, 2))) > 0.5).float().flatten(1))
    return torch.stack(drawn)


def _read_camera(frames: torch.Tensor, vivid: torch.Tensor) -> str:
    """Find the pan that matches the background best between frames a quarter of the video apart."""
    side = CLIP_SIZE // 2
    small = F.avg_pool2d(frames, 2)  # [F, 3, side, side]
    bare = F.max_pool2d(vivid[:, None].float(), 11, stride=2, padding=5) == 0  # rims and shadows surround stickers
    interval = max(1, (len(frames) - 1) // 4)
    most = side // 5
    errors = []
    for shift in range(-most, most + 1):  # pixels by which the background moves to the right in `interval` frames
        before, after = slice(max(0, -shift), side - max(0, shift)), slice(max(0, shift), side - max(0, -shift))
        both = bare[:-interval, ..., before] & bare[interval:, ..., after]
        squares = (small[interval:, ..., after] - small[:-interval, ..., before]).square() * both
        errors.append(float(squares.sum() / both.sum().clamp_min(1)))
    moved = (min(range(len(errors)), key=errors.__getitem__) - most) / side * (len(frames) - 1) / interval
    return "left" if moved > LEAST_PAN else "right" if moved < -LEAST_PAN else "still"
