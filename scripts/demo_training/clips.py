"""Videos of scenes: the path of each object, and all frames rendered in batches at any length and resolution.

A video has the image demo's landscape, which moves with a panning camera, and stickers. Stickers move relative to the
frame: a pan moves only the background. Details outside the prompt (tilts, small shifts) are random and small.
"""

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import prompts
from .clip_prompts import TIME_OF_DAY, ClipScene, describe, draw_scene
from .motion import PATH_NUMBERS, choose_path, follow
from .prompts import HeldOutPrompt
from .rendering import LANDSCAPE_NUMBERS, landscape_numbers, paint_landscape, paint_stickers, window_grid
from .scenes import COLOURS, SHAPES, Drawn, Landscape, draw_training_scene

MOST_ACTORS = 2
ACTOR_NUMBERS = PATH_NUMBERS + 3  # radius, shape, colour
CLIP_NUMBERS = LANDSCAPE_NUMBERS + 1 + MOST_ACTORS * ACTOR_NUMBERS
PAN = 0.3  # frame widths of a camera pan over a video
SPAN = 0.24  # frame widths of a walk over a video, and of each way of a bounce
PAN_SIGNS = {"still": 0, "left": -1, "right": 1}
SOFTNESS = 2.0  # of a sticker's edge in pixels: a sharp edge that moves costs an autoencoder most of its capacity
PIXELS_AT_ONCE = 64 * 256 * 256  # about 1 GB of intermediate values


def draw_clip(rng: random.Random, scene: ClipScene | None = None) -> Drawn:
    """Choose a video of `scene`, or of a random training scene."""
    scene = scene or draw_training_scene(rng, draw_scene)
    prompt = describe(scene, rng)
    landscape = Landscape(
        place=scene.place,
        time=TIME_OF_DAY[scene.place],
        horizon=0.60 + rng.uniform(-0.02, 0.02),
        phases=(0.10, 0.45, 0.80),
        light_x=0.66 + rng.uniform(-0.03, 0.03),
        drift=0.25,
    )
    numbers = [*landscape_numbers(landscape), PAN * PAN_SIGNS[scene.camera]]
    actors = [_actor_numbers(scene, index, rng) for index in range(len(scene.actors))]
    actors += [[0.0] * ACTOR_NUMBERS] * (MOST_ACTORS - len(actors))
    return Drawn(prompt, scene, numbers + [number for actor in actors for number in actor])


def pack(clips: Sequence[Drawn]) -> torch.Tensor:
    """Pack the numbers for rendering: float32 [N, CLIP_NUMBERS]."""
    return torch.tensor([clip.numbers for clip in clips], dtype=torch.float32)


def held_out_prompts(count: int = prompts.DEFAULT_COUNT, split: str = "tuning") -> list[HeldOutPrompt]:
    """Return the first `count` prompts of scenes never seen in training, like `prompts.held_out_prompts`."""
    return prompts.held_out_prompts(count, split, draw=draw_scene, write=describe)


def render_clips(
    numbers: torch.Tensor, *, frames: int, size: int, corner: torch.Tensor | None = None, extent: float = 1.0
) -> torch.Tensor:
    """Render videos of `pack`'s numbers, on their device: float32 [N, 3, frames, size, size] in -1..1.

    Windows are as in `rendering.render`; frames are evenly spaced from start to end.
    """
    times = torch.linspace(0, 1, frames, device=numbers.device)
    drawn = torch.empty(len(numbers), frames, 3, size, size, device=numbers.device)
    corner = torch.zeros(len(numbers), 2, device=numbers.device) if corner is None else corner
    corners = corner.repeat_interleave(frames, dim=0)
    at_once = max(1, PIXELS_AT_ONCE // size**2)
    rows = drawn.flatten(0, 1)
    pans, objects = _frame_numbers(numbers, times)
    landscapes = numbers[:, :LANDSCAPE_NUMBERS].repeat_interleave(frames, dim=0)
    for start in range(0, len(rows), at_once):
        chunk = slice(start, start + at_once)
        x, y, pixel = window_grid(corners[chunk], size, extent)
        canvas = paint_landscape(landscapes[chunk], x + pans[chunk, None, None], y, pixel)
        paint_stickers(canvas, objects[chunk], x, y, SOFTNESS * pixel)
        rows[chunk] = canvas.clamp(0, 1) * 2 - 1
    return drawn.transpose(1, 2)


def film_strips(clips: torch.Tensor, shown: int = 6) -> torch.Tensor:
    """Place some frames of each video side by side, for `exporting.contact_sheet`.

    Takes videos [N, 3, F, H, W] in 0..1 and returns [N, 3, H, shown * (W + gap)]: `shown` frames from the first to the
    last, with a white gap after each.
    """
    index = torch.linspace(0, clips.shape[2] - 1, shown).round().long()
    frames = F.pad(clips[:, :, index.to(clips.device)], (0, clips.shape[-1] // 32), value=1.0)
    return frames.permute(0, 1, 3, 2, 4).flatten(3)


def _frame_numbers(numbers: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Camera position [N * F] and stickers [N * F, MOST_ACTORS, OBJECT_NUMBERS] of every frame."""
    pans = numbers[:, LANDSCAPE_NUMBERS, None] * (times - 0.5)
    actors = numbers[:, LANDSCAPE_NUMBERS + 1 :].unflatten(1, (MOST_ACTORS, ACTOR_NUMBERS))
    x, y, angle = follow(actors[..., :PATH_NUMBERS], times)  # [N, actors, F]
    radius, shape, colour = (column[..., None].expand_as(x) for column in actors[..., PATH_NUMBERS:].unbind(-1))
    objects = torch.stack((x, y, radius, angle.cos(), angle.sin(), shape, colour, torch.zeros_like(x)), dim=-1)
    return pans.flatten(), objects.transpose(1, 2).flatten(0, 1)


def _actor_numbers(scene: ClipScene, index: int, rng: random.Random) -> list[float]:
    """Path, radius, shape and colour of one actor."""
    actor = scene.actors[index]
    centre_y, radius = {
        "single": ((0.5, 0.18),),
        "above": ((0.26, 0.145), (0.74, 0.145)),
        "below": ((0.74, 0.145), (0.26, 0.145)),
    }[scene.layout][index]
    radius *= rng.uniform(0.97, 1.03)
    path = choose_path(
        actor.motion,
        (0.5 + rng.uniform(-0.02, 0.02), centre_y + rng.uniform(-0.02, 0.02)),
        span=SPAN,
        tilt=rng.uniform(-0.1, 0.1),
    )
    return [*path.numbers(), radius, SHAPES.index(actor.shape), COLOURS.index(actor.colour)]
