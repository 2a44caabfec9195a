"""Grammar of scenes: the content of an image, its prompt, and the place of each object.

A scene is a landscape (place, time of day) with one to three groups of paper stickers. `Scene` has an attribute for
everything that a prompt can say. The rest (small shifts, hill phases) is random for each image and small, because an
11M-parameter model is sharp only where the prompt nearly determines the image. For the same reason anything that a
short prompt leaves out has a fixed value: "a yellow ring" is one in the middle, over green hills at noon.

Plain Python without torch, so that other scripts can read held-out prompts quickly.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

SceneT = TypeVar("SceneT")

PLACES = ("hills", "desert", "sea", "mountains")
TIMES = ("noon", "sunset", "night")
SHAPES = ("circle", "square", "triangle", "star", "heart", "ring")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink")
SIZES = ("small", "medium", "large")
TEXTURES = ("plain", "striped", "dotted")
LAYOUTS = ("single", "above", "below", "left", "right", "trio")
POSITIONS = {"one": ("left", "right", "centre", "top", "bottom"), "row": ("centre", "top", "bottom")}

RESERVED_CLASSES = {"reporting": 0, "tuning": 1}  # of HASH_CLASSES; scenes of these classes are never in training
HASH_CLASSES = 16
MOST_OBJECTS = 6

PLACE_WORDS = {
    "hills": ("green hills", "the hills"),
    "desert": ("a golden desert", "the desert"),
    "sea": ("a calm sea", "the sea"),
    "mountains": ("snowy mountains", "the mountains"),
}
TIME_WORDS = {"noon": ("at noon", "by day"), "sunset": ("at sunset", "at dusk"), "night": ("at night", "by night")}
SHAPE_WORDS = {
    "circle": (("circle", "circles"), ("ball", "balls")),
    "square": (("square", "squares"), ("box", "boxes")),
    "triangle": (("triangle", "triangles"),),
    "star": (("star", "stars"),),
    "heart": (("heart", "hearts"),),
    "ring": (("ring", "rings"), ("hoop", "hoops")),
}
SIZE_WORDS = {"small": ("small", "little"), "medium": ("",), "large": ("large", "big")}
TEXTURE_WORDS = {"plain": ("",), "striped": ("striped",), "dotted": ("dotted", "spotted")}
COUNT_WORDS = {1: ("a", "one"), 2: ("two",), 3: ("three",), 4: ("four",)}
POSITION_WORDS = {
    "left": ("on the left",),
    "right": ("on the right",),
    "centre": ("in the middle", "in the centre"),
    "top": ("at the top",),
    "bottom": ("at the bottom",),
}
RELATION_WORDS = {"above": ("above",), "below": ("below", "under"), "left": ("left of",), "right": ("right of",)}
TEMPLATES = {  # key: whether the prompt names the place, and the time
    (True, True): (
        "{objects} over {place} {time}",
        "{objects}, {place} {time}",
        "{time}, {objects} over {place}",
        "{objects} over {place}, {time}",
        "a picture of {objects} over {place} {time}",
    ),
    (True, False): ("{objects} over {place}", "{objects}, {place}", "a picture of {objects} over {place}"),
    (False, True): ("{objects} {time}", "{objects}, {time}", "a picture of {objects} {time}"),
    (False, False): ("{objects}", "{objects}", "a picture of {objects}"),
}

# Default values that short prompts leave out; the default size and texture have no word.
UNSAID_PLACE, UNSAID_TIME, UNSAID_POSITION = "hills", "noon", "centre"
UNSAID_COLOURS = {  # of a single group
    "circle": "orange", "square": "blue", "triangle": "green", "star": "yellow", "heart": "red", "ring": "purple"
}  # fmt: skip
SHORT_PROMPTS = 0.4  # of the prompts in training

RADII = {  # of the object in image widths, by number of objects in its row
    "small": {1: 0.105, 2: 0.088, 3: 0.078, 4: 0.068},
    "medium": {1: 0.150, 2: 0.120, 3: 0.103, 4: 0.085},
    "large": {1: 0.200, 2: 0.155, 3: 0.122, 4: 0.098},
}
CENTRES = {
    "left": (0.26, 0.50),
    "right": (0.74, 0.50),
    "centre": (0.50, 0.49),
    "top": (0.50, 0.26),
    "bottom": (0.50, 0.74),
}


@dataclass(frozen=True)
class Group:
    """Row of `count` equal objects."""

    shape: str
    colour: str
    size: str
    texture: str
    count: int


@dataclass(frozen=True)
class Scene:
    """Content of a prompt. `position` is empty unless `layout` is "single".

    `layout` above, below, left and right give the first group's position relative to the second; "trio" lists three
    objects from left to right.
    """

    place: str
    time: str
    layout: str
    position: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class PlacedObject:
    """One object to render: centre and radius in image widths (y down), rotation in radians."""

    x: float
    y: float
    radius: float
    rotation: float
    shape: str
    colour: str
    texture: str


@dataclass(frozen=True)
class Landscape:
    """Background to render: `phases` and `drift` in periods, `horizon` and `light_x` in image widths."""

    place: str
    time: str
    horizon: float
    phases: tuple[float, float, float]
    light_x: float
    drift: float


class Drawn(NamedTuple):
    """A scene of another grammar, its prompt, and the numbers that it does not determine or that render it."""

    prompt: str
    scene: Any
    numbers: Sequence[float]


@dataclass(frozen=True)
class Picture:
    """A scene with all details that its prompt leaves open."""

    prompt: str
    scene: Scene
    landscape: Landscape
    objects: tuple[PlacedObject, ...]


def hash_class(scene: object) -> int:
    """Stable class of a scene in 0..HASH_CLASSES-1: the same on every machine and in every Python version.

    A scene is any dataclass of strings and integers, so that its `repr` is complete.
    """
    return hashlib.blake2b(repr(scene).encode(), digest_size=2).digest()[0] % HASH_CLASSES


def draw_scene(rng: random.Random) -> Scene:
    """Choose a random scene, reserved or not."""
    layout = rng.choices(LAYOUTS, weights=(5, 1, 1, 1, 1, 2))[0]
    position = ""
    if layout == "single":
        count = rng.choice((1, 1, 2, 3, 4))
        counts = (count,)
        position = rng.choice(POSITIONS["one" if count == 1 else "row"])
    elif layout in ("above", "below"):
        counts = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
    else:
        counts = (1, 1, 1) if layout == "trio" else (1, 1)
    colours = rng.sample(COLOURS, len(counts))
    groups = tuple(
        Group(
            shape=rng.choice(SHAPES),
            colour=colour,
            size=rng.choice(SIZES),
            texture=rng.choices(TEXTURES, weights=(3, 1, 1))[0],
            count=count,
        )
        for colour, count in zip(colours, counts, strict=True)
    )
    return Scene(rng.choice(PLACES), rng.choice(TIMES), layout, position, groups)


def draw_training_scene(rng: random.Random, draw: Callable[[random.Random], SceneT] = draw_scene) -> SceneT:
    """Choose a random scene with `draw` whose class is not reserved for held-out prompts."""
    while True:
        scene = draw(rng)
        if hash_class(scene) not in RESERVED_CLASSES.values():
            return scene


def draw_short_scene(rng: random.Random) -> Scene:
    """Choose a random scene, reserved or not, in which some attributes have the default value."""
    scene = draw_scene(rng)
    place, time, position, colour = (rng.random() < share for share in (0.6, 0.7, 0.8, 0.15))
    groups = scene.groups
    if colour and len(groups) == 1:
        groups = (replace(groups[0], colour=UNSAID_COLOURS[groups[0].shape]),)
    return replace(
        scene,
        groups=groups,
        place=UNSAID_PLACE if place else scene.place,
        time=UNSAID_TIME if time else scene.time,
        position=UNSAID_POSITION if position and scene.position else scene.position,
    )


def describe(scene: Scene, rng: random.Random, *, short: bool = False) -> str:
    """Write a prompt in lower case that describes all of `scene`; a short one leaves out default values."""
    phrases = [_describe_group(group, rng, short=short and len(scene.groups) == 1) for group in scene.groups]
    if scene.layout == "single":
        position = rng.choice(POSITION_WORDS[scene.position])
        objects = phrases[0] if short and scene.position == UNSAID_POSITION else f"{phrases[0]} {position}"
    elif scene.layout == "trio":
        objects = f"{phrases[0]}, {phrases[1]} and {phrases[2]}" + ("" if short else " side by side")
    elif short and scene.layout == "left":
        objects = f"{phrases[0]} and {phrases[1]}"
    else:
        objects = f"{phrases[0]} {rng.choice(RELATION_WORDS[scene.layout])} {phrases[1]}"
    templates = TEMPLATES[not short or scene.place != UNSAID_PLACE, not short or scene.time != UNSAID_TIME]
    return rng.choice(templates).format(
        objects=objects, place=rng.choice(PLACE_WORDS[scene.place]), time=rng.choice(TIME_WORDS[scene.time])
    )


def place_scene(scene: Scene, rng: random.Random) -> tuple[Landscape, tuple[PlacedObject, ...]]:
    """Choose the details that the prompt leaves open: small shifts and turns of the objects, the shape of the hills."""
    landscape = Landscape(
        place=scene.place,
        time=scene.time,
        horizon=0.60 + rng.uniform(-0.03, 0.03),
        phases=(rng.random(), rng.random(), rng.random()),
        light_x=rng.uniform(0.2, 0.8),
        drift=rng.random(),
    )
    objects: list[PlacedObject] = []
    for index, group in enumerate(scene.groups):
        centre_x, centre_y = _group_centre(scene, index)
        crowding = 2 if scene.layout in ("left", "right") else 3 if scene.layout == "trio" else group.count
        if scene.layout in ("above", "below"):
            crowding = max(crowding, 2)
        radius = RADII[group.size][crowding] * rng.uniform(0.96, 1.04)
        spacing = {1: 0.0, 2: 0.42, 3: 0.30, 4: 0.235}[group.count]
        shift_x, shift_y = rng.uniform(-0.025, 0.025), rng.uniform(-0.025, 0.025)
        for column in range(group.count):
            objects.append(
                PlacedObject(
                    x=centre_x + shift_x + spacing * (column - (group.count - 1) / 2),
                    y=centre_y + shift_y + rng.uniform(-0.012, 0.012),
                    radius=radius,
                    rotation=rng.uniform(-0.14, 0.14),
                    shape=group.shape,
                    colour=group.colour,
                    texture=group.texture,
                )
            )
    return landscape, tuple(objects)


def draw_picture(rng: random.Random, scene: Scene | None = None) -> Picture:
    """Choose an image of `scene`, or of a random training scene, whose prompt may be short."""
    short = scene is None and rng.random() < SHORT_PROMPTS
    scene = scene or draw_training_scene(rng, draw_short_scene if short else draw_scene)
    prompt = describe(scene, rng, short=short)
    landscape, objects = place_scene(scene, rng)
    return Picture(prompt, scene, landscape, objects)


def vocabulary() -> list[str]:
    """List every word that a prompt can hold, sorted; the comma is not a word."""
    phrases = [*(template for choices in TEMPLATES.values() for template in choices), "an and side by side"]
    for table in (PLACE_WORDS, TIME_WORDS, SIZE_WORDS, TEXTURE_WORDS, COUNT_WORDS, POSITION_WORDS, RELATION_WORDS):
        phrases += [phrase for choices in table.values() for phrase in choices]
    phrases += [word for choices in SHAPE_WORDS.values() for pair in choices for word in pair]
    return sorted(words_of(phrases) | set(COLOURS))


def words_of(phrases: Iterable[str]) -> set[str]:
    """Set of the words of some phrases and templates, without commas and `{fields}`."""
    return {word.strip(",") for phrase in phrases for word in phrase.split() if not word.startswith("{")}


def _describe_group(group: Group, rng: random.Random, *, short: bool) -> str:
    singular, plural = rng.choice(SHAPE_WORDS[group.shape])
    words = (
        rng.choice(COUNT_WORDS[group.count]),
        rng.choice(SIZE_WORDS[group.size]),
        "" if short and group.colour == UNSAID_COLOURS[group.shape] else group.colour,
        rng.choice(TEXTURE_WORDS[group.texture]),
        singular if group.count == 1 else plural,
    )
    return " ".join(word for word in words if word).replace("a orange", "an orange")


def _group_centre(scene: Scene, index: int) -> tuple[float, float]:
    if scene.layout == "single":
        return CENTRES[scene.position]
    if scene.layout == "trio":
        return (0.2 + 0.3 * index, 0.49)
    first, second = {
        "above": ((0.5, 0.27), (0.5, 0.73)),
        "below": ((0.5, 0.73), (0.5, 0.27)),
        "left": ((0.29, 0.49), (0.71, 0.49)),
        "right": ((0.71, 0.49), (0.29, 0.49)),
    }[scene.layout]
    return first if index == 0 else second
