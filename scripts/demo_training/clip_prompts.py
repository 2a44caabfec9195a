"""Grammar of videos: the content of a video, and the prompt that describes it.

One or two paper stickers move over one of four landscapes, each with its own light, and the camera may pan. The grammar
is small so that a transformer of four million parameters can follow all of it: two stickers never cross.

Plain Python without torch, so that other scripts can read held-out prompts quickly.
"""

import random
from dataclasses import dataclass

from .scenes import PLACE_WORDS, PLACES, SHAPE_WORDS, words_of

SHAPES = ("circle", "square", "triangle", "star", "heart")
TURNING_SHAPES = ("square", "triangle", "star", "heart")  # a circle has no visible rotation
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple")
CAMERAS = ("still", "left", "right")
LAYOUTS = ("single", "above", "below")
# The pairs with the palest ground, so that small colour errors of a model do not look like stickers.
TIME_OF_DAY = {"hills": "noon", "desert": "noon", "sea": "sunset", "mountains": "night"}

LANE_MOTIONS = ("left", "right", "side to side", "turns", "rests")  # of two actors that stay above each other

MOTION_WORDS = {
    "left": ("moves to the left", "moves left"),
    "right": ("moves to the right", "moves right"),
    "up": ("moves up", "rises"),
    "down": ("moves down", "sinks"),
    "up left": ("moves up to the left", "rises to the left"),
    "up right": ("moves up to the right", "rises to the right"),
    "down left": ("moves down to the left", "sinks to the left"),
    "down right": ("moves down to the right", "sinks to the right"),
    "side to side": ("bounces from side to side", "bounces left and right"),
    "up and down": ("bounces up and down", "bounces"),
    "turns": ("turns", "turns around"),
    "rests": ("rests", "stays"),
}
MOTIONS = tuple(MOTION_WORDS)
COLOUR_WORDS = {colour: (colour,) for colour in COLOURS} | {"yellow": ("yellow", "golden")}
RELATION_WORDS = {"above": ("above",), "below": ("below", "under")}
CAMERA_WORDS = {
    "still": ("",),
    "left": ("the camera pans left", "the camera pans to the left"),
    "right": ("the camera pans right", "the camera pans to the right"),
}
TEMPLATES = ("{action} over {place}", "over {place} {action}", "a clip of {place} where {action}")


@dataclass(frozen=True)
class Actor:
    """One object and its motion. `motion` is relative to the frame, whether the camera pans or not."""

    shape: str
    colour: str
    motion: str


@dataclass(frozen=True)
class ClipScene:
    """Content of a prompt. `layout` is the first actor's position relative to the second."""

    place: str
    camera: str
    layout: str
    actors: tuple[Actor, ...]


def draw_scene(rng: random.Random) -> ClipScene:
    """Choose a random scene with some motion, reserved for held-out prompts or not."""
    layout = rng.choices(LAYOUTS, weights=(6, 1, 1))[0]
    camera = rng.choices(CAMERAS, weights=(2, 1, 1))[0]
    motions = [rng.choice(MOTIONS)]
    if layout != "single":
        motions = [rng.choice(LANE_MOTIONS), rng.choice(LANE_MOTIONS)]
    if camera == "still" and set(motions) == {"rests"}:
        motions[0] = "turns"
    colours = rng.sample(COLOURS, len(motions))
    actors = tuple(
        Actor(rng.choice(TURNING_SHAPES if motion == "turns" else SHAPES), colour, motion)
        for motion, colour in zip(motions, colours, strict=True)
    )
    return ClipScene(rng.choice(PLACES), camera, layout, actors)


def describe(scene: ClipScene, rng: random.Random) -> str:
    """Write a prompt that describes all of `scene`, in lower case."""
    names = [
        f"a {rng.choice(COLOUR_WORDS[actor.colour])} {rng.choice(SHAPE_WORDS[actor.shape])[0]}"
        for actor in scene.actors
    ]
    deeds = [rng.choice(MOTION_WORDS[actor.motion]) for actor in scene.actors]
    action = f"{names[0]} {deeds[0]}"
    if scene.layout != "single":
        action += f" {rng.choice(RELATION_WORDS[scene.layout])} {names[1]}"
        if scene.actors[1].motion != "rests":
            action += f" that {deeds[1]}"
    sentence = rng.choice(TEMPLATES).format(action=action, place=rng.choice(PLACE_WORDS[scene.place]))
    camera = rng.choice(CAMERA_WORDS[scene.camera])
    return ", ".join(part for part in (sentence, camera) if part).replace("a orange", "an orange")


def vocabulary() -> list[str]:
    """List every word that a prompt can hold, sorted; the comma is not a word."""
    phrases = [*TEMPLATES, "a an that", *(singular for shape in SHAPES for singular, _ in SHAPE_WORDS[shape])]
    for table in (COLOUR_WORDS, PLACE_WORDS, MOTION_WORDS, RELATION_WORDS, CAMERA_WORDS):
        phrases += [phrase for choices in table.values() for phrase in choices]
    return sorted(words_of(phrases))
