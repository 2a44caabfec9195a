"""Held-out prompts: scenes never seen in training, in two disjoint lists.

`tuning` is for choosing presets and thresholds, `reporting` for published figures.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from .clip_prompts import ClipScene
from .scenes import RESERVED_CLASSES, Scene, describe, draw_scene, hash_class

DEFAULT_COUNT = 32


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt, the seed of its initial noise, and the content that its image or video must show."""

    prompt: str
    seed: int
    scene: Scene | ClipScene


def held_out_prompts(
    count: int = DEFAULT_COUNT, split: str = "tuning", *, draw: Callable = draw_scene, write: Callable = describe
) -> list[HeldOutPrompt]:
    """Return the first `count` held-out prompts of a split; a longer list starts with the shorter one.

    `draw(rng)` returns a random scene, reserved or not, and `write(scene, rng)` a prompt that describes all of it.
    """
    if split not in RESERVED_CLASSES:
        raise ValueError(f"split must be one of {sorted(RESERVED_CLASSES)}, got {split!r}")
    rng = random.Random(f"held-out {split}")
    prompts: list[HeldOutPrompt] = []
    seen: set[Scene | ClipScene] = set()
    while len(prompts) < count:
        scene = draw(rng)
        if hash_class(scene) == RESERVED_CLASSES[split] and scene not in seen:
            seen.add(scene)
            prompts.append(HeldOutPrompt(write(scene, rng), seed=1000 + len(prompts), scene=scene))
    return prompts
