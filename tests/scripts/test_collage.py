"""Collages, on a small archive of plain ones, and a training run at toy size."""

import json
import random
import zipfile

import pytest
import torch
from PIL import Image

from scripts.demo_training import collage, fetch_collage

SPRITES = {"apple": "red", "palm tree": "green"}
OTHERS = "bee cat dog fox hen key pie saw bus cup hat jam map net owl pea rat sun van yak"  # for enough scenes
PHOTOGRAPHS = {"sea": "blue", "moss": "darkgreen", "planks": "brown"}


@pytest.fixture(autouse=True)
def archive(tmp_path, monkeypatch):
    """Replace the archive by one of images of one colour each; sprites are packed as fetched ones are."""
    monkeypatch.setattr(collage, "ARCHIVE", tmp_path / "collage.zip")
    for cached in (collage.members, collage.images):
        cached.cache_clear()
    counts = fetch_collage.Counter()
    with zipfile.ZipFile(collage.ARCHIVE, "w") as packed:
        for name, colour in (SPRITES | dict.fromkeys(OTHERS.split(), "gold")).items():
            sprite = fetch_collage.square(Image.new("RGBA", (90, 60), colour))
            fetch_collage.add(packed, f"sprites/{name}", sprite, counts, "WEBP", quality=88)
        for name, colour in PHOTOGRAPHS.items():
            photograph = Image.new("RGB", collage.PHOTOGRAPH_SIZE, colour)
            fetch_collage.add(packed, f"photographs/{name}", photograph, counts, "JPEG", quality=86)
    yield
    for cached in (collage.members, collage.images):
        cached.cache_clear()


def test_a_prompt_names_all_that_an_image_shows():
    """The vocabulary holds each word, a sprite has its colour at its place, and the photograph its own elsewhere."""
    rng = random.Random(0)
    drawn = collage.draw_collage(rng, collage.CollageScene(("palm tree", "apple"), "sea"))
    assert drawn.prompt == "a palm tree and an apple over sea"
    assert set(drawn.prompt.split()) <= set(collage.collage_vocabulary())
    numbers = collage.pack_collages([drawn])
    image = collage.render_collages(numbers, 64)[0]
    places = {"green": numbers[0, 6:8], "red": numbers[0, 13:15], "blue": torch.zeros(2)}
    for colour, place in places.items():
        column, row = (place * 64).int().tolist()
        found = (image[:, row, column] + 1) * 127.5
        expected = torch.tensor(Image.new("RGB", (1, 1), colour).getpixel((0, 0)))
        assert (found - expected).abs().max() < 12, colour


def test_a_window_shows_that_part_of_the_whole_image():
    """Pixels of a window at twice the scale average to the whole image's."""
    numbers = collage.pack_collages([collage.draw_collage(random.Random(seed)) for seed in range(6)])
    whole = collage.render_collages(numbers, 64)
    window = collage.render_collages(numbers, 64, corner=torch.full((6, 2), 0.25), extent=0.5)
    halved = torch.nn.functional.avg_pool2d(window, 2)
    torch.testing.assert_close(halved, whole[:, :, 16:48, 16:48], atol=1e-4, rtol=0)


def test_emoji_are_things_of_one_or_two_words():
    """People, symbols and long names are left out."""
    names = dict(fetch_collage.emoji())
    assert names[0x1F98A] == "fox" and names[0x1F353] == "strawberry"
    assert 0x1F468 not in names  # a man
    assert all(len(name.split()) <= 2 for name in names.values())


def test_a_missing_archive_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(collage, "ARCHIVE", tmp_path / "none.zip")
    with pytest.raises(FileNotFoundError, match="fetch_collage"):
        collage.members("sprites")


def test_a_toy_training_run_yields_a_pipeline(tmp_path, train):
    folder, results = tmp_path / "demo", tmp_path / "results"
    train("--model", "demo-pictures", "--output", folder, "--results", results)
    assert json.loads((results / "prompt_following.json").read_text())["drawn 32px"]["pictures"] == 1
    assert "palm" in json.loads((folder / "demo.json").read_text())["words"]
