"""Scenes that the demo models learn, and training runs at toy size."""

import json
import random

import pytest
import torch
from diffusers import DiffusionPipeline

from dit_accel import preset_names
from scripts.demo_training import clips, prompts, rendering, scenes
from scripts.demo_training.image_demo import ImageDemo
from scripts.demo_training.scenes import RESERVED_CLASSES, hash_class
from scripts.demo_training.texture_demo import TextureDemo

KINDS = {  # how scenes are drawn, packed and rendered, and lists of held-out prompts
    "pictures": (scenes.draw_picture, rendering.pack_pictures, rendering.render, prompts.held_out_prompts),
    "short": (scenes.draw_picture, rendering.pack_pictures, rendering.render, ImageDemo.short_prompts),
    "textures": (TextureDemo.draw, TextureDemo.pack, TextureDemo.render, TextureDemo.held_out),
    "clips": (
        clips.draw_clip,
        clips.pack,
        lambda numbers, size, **window: clips.render_clips(numbers, frames=2, size=size, **window),
        clips.held_out_prompts,
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_one_seed_draws_the_same_scenes(kind):
    """The grammar is a pure function of its random generator, and every scene has equally many numbers."""
    draw, pack, *_ = KINDS[kind]
    first, again, other = ([draw(random.Random(seed + i)) for i in range(20)] for seed in (0, 0, 100))
    assert first == again != other and len(pack(first)) == 20


@every_kind
def test_held_out_lists_are_stable_disjoint_and_never_trained_on(kind):
    """A longer list starts with the shorter one, the splits share no prompt, and training has no scene of either."""
    draw, *_, held_out = KINDS[kind]
    rng = random.Random(1)
    assert {hash_class(draw(rng).scene) for _ in range(300)}.isdisjoint(RESERVED_CLASSES.values())
    lists = {split: held_out(40, split) for split in RESERVED_CLASSES}
    for split, reserved in RESERVED_CLASSES.items():
        assert {hash_class(item.scene) for item in lists[split]} == {reserved}
        assert lists[split][:10] == held_out(10, split)
    if kind != "short":
        assert {item.prompt for item in lists["tuning"]}.isdisjoint(item.prompt for item in lists["reporting"])
    with pytest.raises(ValueError, match="split must be one of"):
        held_out(1, "training")


@pytest.mark.parametrize("kind", ["pictures", "clips"])
def test_a_window_is_a_part_of_the_whole(kind):
    """Rendering only the lower right quarter gives the pixels of the whole image or frame there."""
    draw, pack, render, _ = KINDS[kind]
    numbers = pack([draw(random.Random(seed)) for seed in range(3)])
    quarter = render(numbers, 48, corner=torch.full((3, 2), 0.5), extent=0.5)
    torch.testing.assert_close(quarter, render(numbers, 96)[..., 48:, 48:], atol=1e-4, rtol=0)


def load(folder):
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def changes(one, other):
    others = other.state_dict()
    return {name: float((weight - others[name]).abs().max()) for name, weight in one.state_dict().items()}


@pytest.mark.parametrize("model", ["demo-flux", "demo-wan", "demo-hunyuan"])
def test_a_toy_training_run_yields_a_pipeline(model, tmp_path, train):
    """Two steps of everything leave a folder that diffusers loads and runs, and a state to resume from."""
    is_video, arguments = model != "demo-flux", ("--model", model, "--output")
    train(*arguments, tmp_path / "demo", "--state", tmp_path / "state", "--results", tmp_path / "results")
    following = json.loads((tmp_path / "results" / "prompt_following.json").read_text())
    if is_video:
        assert json.loads((tmp_path / "results" / "training.json").read_text())["flow"][0]["loss 5 frames"] > 0
        assert following["drawn"]["all"] == 1.0 and following["painted, 9 frames of 48px"]["clips"] == 1
    else:
        assert following["drawn 32px"]["pictures"] == 1
    assert (tmp_path / "results" / "samples.webp").stat().st_size > 100

    pipe, call = load(tmp_path / "demo"), json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert "circle" in call.pop("words")
    if is_video:
        assert call.pop("fps") == 8 and call.pop("preset") in preset_names()
    sizes = {} if is_video else {"height": 32, "width": 32}
    output = pipe("A red zebra?", **call | sizes | {"num_inference_steps": 2}, output_type="np")[0][0]
    assert output.shape == ((5, 32, 32, 3) if is_video else (32, 32, 3)) and output.std() > 0

    train(*arguments, tmp_path / "more", "--resume", tmp_path / "state", "--seed", 1)
    resumed = load(tmp_path / "more")
    assert not any(changes(pipe.vae, resumed.vae).values())
    assert 0 < max(changes(pipe.transformer, resumed.transformer).values()) < 0.02  # from the state, not from nothing


def test_autoencoders_are_trained_and_taken_apart(tmp_path, train):
    arguments = ("--model", "demo-wan", "--output")
    train(*arguments, tmp_path / "demo", "--state", tmp_path / "state")
    train(*arguments, tmp_path / "decoder", "--resume", tmp_path / "state", "--vae-seconds", 1, "--freeze-encoder")
    pipe, decoder = load(tmp_path / "demo"), load(tmp_path / "decoder")
    changed = {name.split(".")[0] for name, change in changes(pipe.vae, decoder.vae).items() if change}
    assert changed == {"decoder", "post_quant_conv"}
    train(*arguments, tmp_path / "other", "--resume", tmp_path / "state", "--vae", tmp_path / "decoder", "--minutes", 0)
    other = load(tmp_path / "other")
    assert not any(changes(other.vae, decoder.vae).values())
    assert not any(changes(other.transformer, pipe.transformer).values())
