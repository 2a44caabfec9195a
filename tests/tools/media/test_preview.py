"""Coarse images of unfinished steps: a linear decoder is found again in each layout of latents."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel.tools.media import preview
from dit_accel.tools.media.preview import Previewer

ROWS, COLUMNS, CHANNELS = 6, 9, 4


def scene(seed):
    """Latents of a grid [rows, columns, channels], and the image that a linear decoder makes of them."""
    latents = torch.randn(ROWS, COLUMNS, CHANNELS, generator=torch.Generator().manual_seed(seed))
    decoder = torch.randn(CHANNELS, 3, generator=torch.Generator().manual_seed(99))
    colours = (128 + 8 * latents @ decoder).clamp(0, 255).byte().numpy()
    return latents, Image.fromarray(colours).resize((16 * COLUMNS, 16 * ROWS), Image.Resampling.NEAREST)


def frames(grid, count=3):
    return torch.stack([9 * grid] * (count // 2) + [grid] + [0 * grid] * (count - count // 2 - 1))


LAYOUTS = {
    "images": lambda grid: grid.permute(2, 0, 1)[None],
    "videos": lambda grid: frames(grid).permute(3, 0, 1, 2)[None],
    "videos-frames-first": lambda grid: frames(grid).permute(0, 3, 1, 2)[None],
    "videos-channels-last": lambda grid: frames(grid)[None],
    "packed": lambda grid: grid.reshape(1, ROWS * COLUMNS, CHANNELS),
}


def seen(previewer, latents, sigmas=None):
    previewer.latents = latents
    return previewer.image(sigmas)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_preview_looks_like_the_decoded_image(layout):
    """Of latents that it has not seen; before a fit there is none."""
    previewer = Previewer()
    previewer.channels = CHANNELS
    (known, image), (other, expected) = scene(0), scene(1)
    assert seen(previewer, layout(known)) is None
    previewer.learn(image)
    drawn, decoded = (
        np.asarray(image.resize((COLUMNS, ROWS), Image.Resampling.BOX), float)
        for image in (seen(previewer, layout(other)), expected)
    )
    assert np.abs(drawn - decoded).mean() < 2


@pytest.mark.parametrize(
    "pipe, count, has_preview",
    [
        ({"vae": {"latent_channels": CHANNELS}, "transformer": {"in_channels": 99}}, 3, True),
        ({"vae": {"z_dim": CHANNELS}}, 3, True),
        ({"transformer": {"in_channels": CHANNELS}}, 3, True),
        ({"vae": {"latent_channels": 3}}, 5, False),
        ({"vae": {"latent_channels": CHANNELS}}, CHANNELS, False),
        ({}, 3, False),
    ],
    ids=["autoencoder", "wan", "transformer", "other-number", "as-many-frames", "unknown"],
)
def test_channels_of_a_video_are_read_from_the_pipeline(pipe, count, has_preview):
    """Without them, or with as many frames, frames can't be told from channels."""
    models = {name: SimpleNamespace(config=SimpleNamespace(**config)) for name, config in pipe.items()}
    previewer, (known, image) = Previewer(), scene(0)
    latents = frames(known, count).permute(0, 3, 1, 2)[None]
    previewer.watch()(SimpleNamespace(**models), 0, None, {"latents": latents})
    previewer.learn(image)
    assert (seen(previewer, latents) is not None) is has_preview


def test_a_preview_has_no_noise():
    """Two steps along a straight line to the clean latents lead to the same image as these."""
    previewer, (known, image) = Previewer(), scene(0)
    clean, noise = LAYOUTS["images"](known), torch.randn(1, CHANNELS, ROWS, COLUMNS)
    previewer.latents = clean
    previewer.learn(image)
    expected = np.asarray(seen(previewer, clean), float)
    previewer._before = 0.2 * clean + 0.8 * noise
    drawn = np.asarray(seen(previewer, 0.4 * clean + 0.6 * noise, (0.8, 0.6)), float)
    assert np.abs(drawn - expected).max() <= 1


@pytest.mark.parametrize("end", ["learn", "forget", "watch"])
def test_a_run_keeps_no_latents_of_another(end):
    """They take memory on the GPU, and the first step of a run has no step before it."""
    previewer, latents, pipe = Previewer(), LAYOUTS["images"](scene(0)[0]), SimpleNamespace()
    callback = previewer.watch()
    for index in range(2):
        callback(pipe, index, None, {"latents": latents})
    assert previewer.latents is latents and previewer._before is latents
    {"learn": lambda: previewer.learn(scene(0)[1]), "forget": previewer.forget_latents, "watch": previewer.watch}[end]()
    assert previewer.latents is None and previewer._before is None
    previewer.watch()(pipe, 0, None, {"latents": latents})
    assert previewer.latents is latents and previewer._before is None


@pytest.mark.parametrize("index, levels", [(0, (4.0, 3.0)), (2, (2.0, 0.0)), (3, None)])
def test_noise_levels_are_those_before_and_after_a_step(index, levels):
    """The last step ends at the last level; more steps than levels have none."""
    pipe = SimpleNamespace(scheduler=SimpleNamespace(sigmas=torch.tensor([4.0, 3.0, 2.0, 0.0])))
    assert preview._sigmas(pipe, index) == levels
    assert preview._sigmas(SimpleNamespace(), index) is None


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (120, 180, 3), np.uint8))


@pytest.mark.parametrize(
    ("latents", "output"),
    [
        (torch.zeros(1, 53, 4), scene(0)[1]),
        (torch.zeros(1, 4), scene(0)[1]),
        (None, scene(0)[1]),
        (torch.randn(1, CHANNELS, 60, 90), NOISE),
    ],
    ids=["ragged", "flat", "none", "unexplained"],
)
def test_other_layouts_and_unexplained_outputs_give_no_preview(latents, output):
    previewer = Previewer()
    previewer.latents = latents
    previewer.learn(output)
    assert not previewer.has_learned and seen(previewer, latents) is None


def test_a_call_whose_latents_change_their_form_goes_on():
    """Some pipelines denoise a small image first, or keep several latents in a list; others return lists of images."""
    previewer, shown, pipe = Previewer(), [], SimpleNamespace(scheduler=SimpleNamespace(sigmas=torch.arange(5) / 4))
    previewer.latents = LAYOUTS["images"](scene(0)[0])
    previewer.learn(scene(0)[1])
    callback, whole = previewer.watch(shown.append, lambda index: True), LAYOUTS["images"](scene(1)[0])
    for index, latents in enumerate((whole[..., ::2], whole, [whole])):
        assert callback(pipe, index, None, {"latents": latents}) == {}
    assert len(shown) == 2
    callback(pipe, 3, None, {"latents": whole})
    previewer.learn([scene(1)[1]] * 2)
    assert seen(previewer, whole) is None


def test_a_preview_is_shown_at_most_once_a_second(monkeypatch):
    """The callback changes nothing of the call."""
    now = SimpleNamespace(seconds=10.0)
    monkeypatch.setattr(preview, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    previewer, shown = Previewer(), []
    previewer.latents = LAYOUTS["images"](scene(0)[0])
    previewer.learn(scene(0)[1])
    callback = previewer.watch(shown.append)
    for index in range(10):
        now.seconds += 0.3
        assert callback(SimpleNamespace(), index, None, {"latents": LAYOUTS["images"](scene(index)[0])}) == {}
    assert [image.size for image in shown] == [scene(0)[1].size] * 2
