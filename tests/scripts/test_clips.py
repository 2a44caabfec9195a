"""Grammar, motions, renderer and reader of the demo videos."""

import random

import pytest
import torch

from scripts.demo_training import clips as clips_module
from scripts.demo_training import palette
from scripts.demo_training.clip_prompts import LAYOUTS, MOTIONS, Actor, ClipScene, describe, draw_scene, vocabulary
from scripts.demo_training.clip_reading import agreement, read_clips
from scripts.demo_training.clips import draw_clip, held_out_prompts, pack, render_clips


def single(motion: str, camera: str = "still", place: str = "hills", colour: str = "red") -> ClipScene:
    """One heart alone."""
    return ClipScene(place, camera, "single", (Actor("heart", colour, motion),))


def drawn(*scenes: ClipScene, frames: int = 9, size: int = 80) -> torch.Tensor:
    """One video of each scene in 0..1."""
    rng = random.Random(11)
    return (render_clips(pack([draw_clip(rng, scene) for scene in scenes]), frames=frames, size=size) + 1) / 2


def test_a_prompt_says_all_of_its_scene_in_known_words():
    """No two scenes share a prompt, and the vocabulary has exactly the words of the prompts."""
    rng, scenes = random.Random(2), {}
    for _ in range(4000):
        scene = draw_scene(rng)
        assert scenes.setdefault(describe(scene, rng), scene) == scene
    assert {word.strip(",") for prompt in scenes for word in prompt.split()} == set(vocabulary())


def test_something_moves_in_every_scene():
    """No scene rests before a still camera, no circle turns, and two objects differ in colour."""
    rng = random.Random(3)
    for scene in (draw_scene(rng) for _ in range(2000)):
        assert scene.camera != "still" or any(actor.motion != "rests" for actor in scene.actors)
        assert not any(actor.shape == "circle" and actor.motion == "turns" for actor in scene.actors)
        assert len({actor.colour for actor in scene.actors}) == len(scene.actors)


def test_every_clip_stays_in_the_picture():
    """Along the border of the frame no pixel is as vivid as a sticker, in any frame."""
    rng = random.Random(6)
    pictures = (render_clips(pack([draw_clip(rng) for _ in range(24)]), frames=5, size=48) + 1) / 2
    pixels = torch.cat((pictures[..., 0, :], pictures[..., -1, :], pictures[..., 0], pictures[..., -1]), dim=-1)
    chroma = pixels.amax(dim=1) - pixels.amin(dim=1)
    assert not ((chroma > 0.345) & (chroma > 0.57 * pixels.amax(dim=1))).any()


def test_chunks_draw_the_same_pixels(monkeypatch):
    """A few frames at a time equal all frames at once."""
    rng = random.Random(8)
    numbers = pack([draw_clip(rng) for _ in range(3)])
    whole = render_clips(numbers, frames=3, size=64)
    assert whole.shape == (3, 3, 3, 64, 64)
    monkeypatch.setattr(clips_module, "PIXELS_AT_ONCE", 2 * 64 * 64)
    torch.testing.assert_close(render_clips(numbers, frames=3, size=64), whole)


def test_more_frames_show_the_same_clip():
    """Seventeen frames contain those of nine: time runs over the video whatever its length."""
    few, many = (drawn(single("up right", "left"), frames=frames, size=32) for frames in (9, 17))
    torch.testing.assert_close(many[:, :, ::2], few, atol=1e-4, rtol=0)


def test_the_reader_reads_drawn_clips():
    """All attributes of rendered videos of every motion and layout are read correctly; other scenes do not match."""
    scenes = [single(motion, colour=colour) for motion, colour in zip(MOTIONS, ["red", "green"] * 6, strict=True)]
    rng, held_out = random.Random(9), [item.scene for item in held_out_prompts(40)]
    scenes += [next(scene for scene in held_out if scene.layout == layout) for layout in LAYOUTS]
    readings = read_clips(drawn(*scenes))
    assert agreement(readings, scenes)["all"] == 1.0
    rng.shuffle(scenes)
    assert agreement(readings, scenes)["all"] < 0.3


def test_the_reader_tells_the_direction_of_time():
    """Played backwards, a walk and a pan go the other way, and a turn is no longer clockwise."""
    readings = read_clips(drawn(single("down left", "left"), single("turns")).flip(2))
    found = [(reading.actors[0].motion, reading.camera) for reading in readings]
    assert found == [("up right", "right"), ("rests", "still")]


def test_the_reader_sees_nothing_in_a_bare_landscape():
    """A video without stickers, or with noise in their colours, has no object and agrees with no prompt."""
    bare = pack([draw_clip(random.Random(1), single("rests", "left"))])
    bare[:, -20:] = 0
    clip = (render_clips(bare, frames=5, size=64) + 1) / 2
    specks = torch.rand(1, 1, 5, 64, 64, generator=torch.Generator().manual_seed(0)) < 0.02
    red = torch.tensor(palette.STICKER["red"]).view(1, 3, 1, 1, 1)
    for pixels in (clip, torch.where(specks, red, clip)):
        readings = read_clips(pixels)
        assert readings[0].actors == () and agreement(readings, [single("rests", "left")])["shape"] == 0


@pytest.mark.parametrize("damage", ["torn", "shrunk", "scrap"])
def test_the_reader_tells_whether_objects_stay_whole(damage):
    """A heart torn in two, or half covered, in one frame is not whole; nor is it beside a scrap of another colour."""
    scene = single("right")
    clip = drawn(scene, size=128)
    assert agreement(read_clips(clip), [scene])["whole"] == 1
    bare = drawn(single("right"), size=128)[:, :, :1, :1].expand_as(clip)  # the sky's first row
    if damage == "torn":
        clip[:, :, 4, :, 61:67] = bare[:, :, 4, :, 61:67]
    elif damage == "shrunk":
        clip[:, :, 4, 64:] = bare[:, :, 4, 64:]
    else:
        clip[:, :, 4, 5:25, 5:25] = torch.tensor(palette.STICKER["green"]).view(3, 1, 1)
    assert agreement(read_clips(clip), [scene])["whole"] == 0
