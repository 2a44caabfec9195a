"""Render scenes in batches from signed distances with analytic anti-aliasing, at any resolution.

Coordinates run from 0 to 1 over the image, x to the right and y down. Coverage of an edge is a ramp one pixel wide over
its signed distance, so the same numbers give the same image at every resolution.
"""

import math
from collections.abc import Sequence

import torch

from . import palette
from .scenes import COLOURS, MOST_OBJECTS, PLACES, SHAPES, TEXTURES, TIMES, Landscape, Picture

LAYERS = 4
RIM = 0.011  # width of a sticker's pale rim, in image widths
OBJECT_NUMBERS = 8  # x, y, radius, cos, sin, shape, colour, texture
LANDSCAPE_NUMBERS = 8  # place, time, horizon, three phases, light_x, drift

# Regular shapes fold onto one edge: corners, inner radius over outer radius, turn (radians), outer radius, rounding.
FOLDS = {
    "circle": (3, 1.0, 0.0, 1.0, 0.0),
    "square": (4, math.cos(math.pi / 4), math.pi / 4, 1.02, 0.12),
    "triangle": (3, 0.5, 0.0, 1.08, 0.08),
    "star": (5, 0.46, 0.0, 1.06, 0.05),
    "heart": (3, 1.0, 0.0, 1.0, 0.0),
    "ring": (3, 1.0, 0.0, 1.0, 0.0),
}


def pack_pictures(pictures: Sequence[Picture]) -> torch.Tensor:
    """Pack the numbers for rendering: float32 [N, LANDSCAPE_NUMBERS + MOST_OBJECTS * OBJECT_NUMBERS].

    Absent objects have radius 0.
    """
    rows = []
    for picture in pictures:
        row = landscape_numbers(picture.landscape)
        for thing in picture.objects:
            row += [thing.x, thing.y, thing.radius, math.cos(thing.rotation), math.sin(thing.rotation)]
            row += [SHAPES.index(thing.shape), COLOURS.index(thing.colour), TEXTURES.index(thing.texture)]
        row += [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0] * (MOST_OBJECTS - len(picture.objects))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float32)


def landscape_numbers(land: Landscape) -> list[float]:
    """The LANDSCAPE_NUMBERS numbers that `paint_landscape` takes."""
    return [PLACES.index(land.place), TIMES.index(land.time), land.horizon, *land.phases, land.light_x, land.drift]


def render(
    numbers: torch.Tensor, size: int, *, corner: torch.Tensor | None = None, extent: float = 1.0
) -> torch.Tensor:
    """Render images of `pack_pictures`' numbers [B, K], on their device: float32 [B, 3, size, size] in -1..1.

    `corner` [B, 2]: x and y of the upper left corner of the rendered window, None = (0, 0); `extent`: its width, 1 =
    all.
    """
    corner = torch.zeros(len(numbers), 2, device=numbers.device) if corner is None else corner
    x, y, pixel = window_grid(corner, size, extent)
    canvas = paint_landscape(numbers[:, :LANDSCAPE_NUMBERS], x, y, pixel)
    paint_stickers(canvas, numbers[:, LANDSCAPE_NUMBERS:].unflatten(1, (MOST_OBJECTS, OBJECT_NUMBERS)), x, y, pixel)
    return canvas.clamp(0, 1) * 2 - 1


def window_grid(corner: torch.Tensor, size: int, extent: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Pixel centres x [B, 1, size] and y [B, size, 1] of windows with corners [B, 2], and the pixel width."""
    pixel = extent / size
    steps = (torch.arange(size, device=corner.device) + 0.5) * pixel
    return (corner[:, 0:1] + steps)[:, None, :], (corner[:, 1:2] + steps)[:, :, None], pixel


def paint_stickers(canvas: torch.Tensor, objects: torch.Tensor, x: torch.Tensor, y: torch.Tensor, pixel: float) -> None:
    """Add stickers [B, slots, OBJECT_NUMBERS] (radius 0 = none) to each canvas [B, 3, H, W] in place, the last on top.

    x [B, 1, W] and y [B, H, 1] are the canvas's coordinates, `pixel` the width of edges in them.
    """
    folds, colours = table_rows(FOLDS, SHAPES, objects), table_rows(palette.STICKER, COLOURS, objects)
    for slot in range(objects.shape[1]):
        rows = objects[:, slot, 2].nonzero()[:, 0]  # few images have many objects
        if len(rows):
            thing = objects[rows, slot]
            fold, colour = folds[thing[:, 5].long()], colours[thing[:, 6].long()]
            canvas[rows] = _paint_sticker(canvas[rows], x[rows], y[rows], thing, fold, colour, pixel)


def sticker_distance(x: torch.Tensor, y: torch.Tensor, shape: torch.Tensor, fold: torch.Tensor) -> torch.Tensor:
    """Signed distance, negative inside, to shapes of about unit radius at x, y [B, H, W], y down.

    `shape` [B, 1, 1] indexes SHAPES; `fold` [B, 5] is the shape's row of the fold table.
    """
    corners, inner, turn, outer, rounding = (column[:, None, None] for column in fold.unbind(1))
    radius = torch.sqrt(x * x + y * y + 1e-12)
    sector = math.pi / corners
    angle = torch.atan2(x, -y) + turn
    angle = (torch.remainder(angle + sector, 2 * sector) - sector).abs()  # from a corner's ray, 0..sector
    fold_x, fold_y = radius * torch.cos(angle), radius * torch.sin(angle)
    tip = outer - rounding
    waist_x, waist_y = tip * inner * torch.cos(sector), tip * inner * torch.sin(sector)
    edge_x, edge_y = waist_x - tip, waist_y
    along = ((fold_x - tip) * edge_x + fold_y * edge_y) / (edge_x * edge_x + edge_y * edge_y)
    along = along.clamp(0, 1)
    off_x, off_y = fold_x - tip - along * edge_x, fold_y - along * edge_y
    outside = torch.sign((fold_x - tip) * edge_y - fold_y * edge_x)
    regular = torch.sqrt(off_x * off_x + off_y * off_y + 1e-12) * outside - rounding

    ring = (radius - 0.70).abs() - 0.27
    is_shape = {name: shape == index for index, name in enumerate(SHAPES)}
    distance = torch.where(is_shape["circle"], radius - 0.95, regular)
    distance = torch.where(is_shape["ring"], ring, distance)
    return torch.where(is_shape["heart"], _heart_distance(x, y), distance)


def _paint_sticker(
    canvas: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    thing: torch.Tensor,
    fold: torch.Tensor,
    colour: torch.Tensor,
    pixel: float,
) -> torch.Tensor:
    """Add one sticker, with its soft shadow and pale rim, to each canvas [B, 3, H, W]; `thing` is [B, 8]."""
    centre_x, centre_y, scale, cosine, sine, shape, _, texture = (column[:, None, None] for column in thing.unbind(1))
    local_x, local_y = (x - centre_x) / scale, (y - centre_y) / scale
    turned_x = cosine * local_x + sine * local_y
    turned_y = cosine * local_y - sine * local_x
    distance = sticker_distance(turned_x, turned_y, shape, fold) * scale

    drop_x, drop_y = local_x - 0.012 / scale, local_y - 0.024 / scale
    fallen = sticker_distance(cosine * drop_x + sine * drop_y, cosine * drop_y - sine * drop_x, shape, fold)
    shadow = torch.sigmoid((RIM - fallen * scale) / 0.010) * 0.34
    canvas = canvas * (1 - shadow[:, None])

    stripes = torch.remainder((turned_x + turned_y) * 1.3, 1.0)
    stripe_distance = ((stripes - 0.5).abs() - 0.25) / 1.3 / math.sqrt(2) * scale
    dot_x = torch.remainder(turned_x * 1.6 + 0.5, 1.0) - 0.5
    dot_y = torch.remainder(turned_y * 1.6 + 0.5, 1.0) - 0.5
    dot_distance = (torch.sqrt(dot_x * dot_x + dot_y * dot_y + 1e-12) - 0.27) / 1.6 * scale
    mark = torch.where(texture == 1, stripe_distance, torch.where(texture == 2, dot_distance, torch.ones_like(x + y)))
    dark = 1 - 0.30 * _coverage(mark, pixel)

    light = (1.06 - 0.10 * (local_y + 1)) * dark  # [B, H, W]; lit from above
    gloss = 0.16 * torch.exp(-((local_x + 0.40) ** 2 + (local_y + 0.45) ** 2) / 0.16)
    fill = colour[:, :, None, None] * light[:, None]
    fill = fill + (1 - fill) * gloss[:, None]
    rim = torch.tensor(palette.STICKER_RIM, device=canvas.device)[None, :, None, None]
    canvas = torch.lerp(canvas, rim.expand_as(canvas), _coverage(distance - RIM, pixel)[:, None])
    return torch.lerp(canvas, fill, _coverage(distance, pixel)[:, None])


def paint_landscape(land: torch.Tensor, x: torch.Tensor, y: torch.Tensor, pixel: float) -> torch.Tensor:
    """Landscapes [B, 3, H, W], about 0..1, of numbers [B, LANDSCAPE_NUMBERS] at x [B, 1, W] and y [B, H, 1].

    x may have any range, so that a window can move along a landscape.
    """
    place, time = land[:, 0].long(), land[:, 1].long()
    horizon, light_x, drift = land[:, 2, None, None], land[:, 6, None, None], land[:, 7, None, None]

    def of_time(table):
        return table_rows(table, TIMES, land)[time][:, :, None, None]  # [B, 3, 1, 1]

    depth = (y / horizon).clamp(0, 1)[:, None]
    canvas = torch.lerp(of_time(palette.SKY_TOP), of_time(palette.SKY_LOW), depth).expand(-1, -1, -1, x.shape[-1])

    noon, sunset, night = (time[:, None, None] == index for index in range(len(TIMES)))
    light_y = torch.where(sunset, horizon - 0.07, torch.where(noon, 0.14, 0.17))
    light_radius = torch.where(sunset, 0.105, torch.where(noon, 0.055, 0.06))
    from_light = torch.sqrt((x - light_x) ** 2 + (y - light_y) ** 2 + 1e-12)
    glow = torch.exp(-((from_light / 0.26) ** 2)) * table_rows(palette.LIGHT_GLOW, TIMES, land)[time][:, :, None]
    disc = _coverage(from_light - light_radius, pixel)
    canvas = torch.lerp(canvas, of_time(palette.LIGHT_DISC).expand_as(canvas), torch.maximum(glow, disc)[:, None])
    rows = noon.nonzero()[:, 0]
    cloud = 0.75 * _coverage(_cloud_distance(x[rows], y[rows], drift[rows]), pixel)[:, None]
    canvas[rows] = canvas[rows] * (1 - cloud) + cloud
    canvas = canvas + (night * _stars(x, y))[:, None]

    far, near = (table_rows(table, PLACES, land)[place] for table in (palette.GROUND_FAR, palette.GROUND_NEAR))
    tint = of_time(palette.GROUND_TINT)
    for layer in range(LAYERS):
        crest, slope = _crest(place[:, None, None], land[:, 3:6], layer, x)  # [B, 1, W]
        edge = horizon + crest + (0.0, 0.09, 0.19, 0.30)[layer]
        above = (edge - y) / torch.sqrt(1 + slope * slope)  # > 0 over the layer
        canvas = canvas * (1 - 0.22 * torch.exp(-above.clamp_min(0) / 0.022))[:, None]
        colour = torch.lerp(far, near, layer / (LAYERS - 1))[:, :, None, None] * tint
        shade = 1 - 0.5 * (y - edge).clamp(0, 0.5)
        canvas = torch.lerp(canvas, colour * shade[:, None], _coverage(above, pixel)[:, None])
    return canvas


def _crest(place: torch.Tensor, phases: torch.Tensor, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Height of a layer's upper edge (down is positive) and its slope, each [B, 1, W]."""
    phase = phases[:, layer % 3, None, None] + 0.37 * (layer // 3)
    waves = 1.0 + 0.35 * layer
    turn = 2 * math.pi * (waves * x + phase)
    hills = 0.035 * torch.sin(turn), 0.035 * 2 * math.pi * waves * torch.cos(turn)
    dune_turn = turn + 0.9 * torch.sin(turn)
    dunes = (
        0.028 * torch.sin(dune_turn),
        0.028 * torch.cos(dune_turn) * (1 + 0.9 * torch.cos(turn)) * 2 * math.pi * waves,
    )
    swell_turn = math.pi * (5.0 + layer) * (x + phase / (5.0 + layer))
    sea = 0.016 * torch.sin(swell_turn).abs() - 0.01, 0.016 * math.pi * (5.0 + layer) * torch.cos(swell_turn)
    height = (0.13, 0.10, 0.05, 0.03)[layer]
    ridge = torch.remainder((2.0 + layer) * x + phase, 1.0)
    mountains = height * ((2 * ridge - 1).abs() * 1.0 - 0.6), (2 * height * (2.0 + layer)) * torch.ones_like(x)
    crest, slope = hills
    for index, (other, other_slope) in ((1, dunes), (2, sea), (3, mountains)):
        crest, slope = torch.where(place == index, other, crest), torch.where(place == index, other_slope, slope)
    return crest, slope


def _cloud_distance(x: torch.Tensor, y: torch.Tensor, drift: torch.Tensor) -> torch.Tensor:
    distance = torch.ones_like(x + y)
    for cloud_x, cloud_y, scale in ((0.0, 0.16, 1.0), (0.55, 0.30, 0.75)):
        centre = torch.remainder(cloud_x + drift, 1.0) * 1.3 - 0.15
        for puff_x, puff_y, puff in ((-0.07, 0.012, 0.028), (0.0, -0.008, 0.045), (0.07, 0.01, 0.032)):
            offset_x, offset_y = x - centre - puff_x * scale, y - cloud_y - puff_y * scale
            distance = torch.minimum(distance, torch.sqrt(offset_x**2 + offset_y**2 + 1e-12) - puff * scale)
        bar_x = ((x - centre).abs() - 0.07 * scale).clamp_min(0)
        bar = torch.sqrt(bar_x**2 + (y - cloud_y - 0.024 * scale) ** 2 + 1e-12) - 0.018 * scale
        distance = torch.minimum(distance, bar)
    return distance


def _stars(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Fixed night sky of 24 soft stars (golden-ratio spacing), so that a small model can learn it."""
    index = torch.arange(24, device=x.device, dtype=torch.float64)
    star_x = torch.remainder(0.5 + index * 0.618034, 1.0).float()
    star_y = 0.02 + 0.5 * torch.remainder(0.3 + index * 0.754878, 1.0).float()
    radius = torch.tensor((0.0035, 0.0050, 0.0028), device=x.device).repeat(8)
    across = torch.exp(-(((x - star_x[:, None]) / radius[:, None]) ** 2))  # [B, 24, W]
    down = torch.exp(-(((y - star_y) / radius) ** 2))  # [B, H, 24]
    return 0.5 * down @ across


def _heart_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance to a square on its corner, with half discs on its two upper sides."""
    side = 0.56  # half of the square's side
    shifted = y - 0.10
    across, up = (x.abs() - shifted) / math.sqrt(2), (x.abs() + shifted) / math.sqrt(2)
    beyond_x, beyond_y = across.abs() - side, up.abs() - side
    square = torch.sqrt(beyond_x.clamp_min(0) ** 2 + beyond_y.clamp_min(0) ** 2 + 1e-12)
    square = square + torch.maximum(beyond_x, beyond_y).clamp_max(0)
    disc = torch.sqrt((across - side) ** 2 + up**2 + 1e-12) - side
    return torch.minimum(square, disc)


def _coverage(distance: torch.Tensor, pixel: float) -> torch.Tensor:
    return (0.5 - distance / pixel).clamp(0, 1)


def table_rows(values: dict, names: Sequence[str], like: torch.Tensor) -> torch.Tensor:
    """Rows of `values` in the order of `names`, [len(names), C], on the device of `like`."""
    rows = [values[name] if isinstance(values[name], tuple) else (values[name],) for name in names]
    return torch.tensor(rows, dtype=torch.float32, device=like.device)
