"""File names and frame rates of commands, without a pipeline."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dit_accel.serving.media import Clips, Pictures, numbered, size_note, unused


@pytest.mark.parametrize("pictures", [1, 2])
@pytest.mark.parametrize("compare", [False, True], ids=["alone", "compared"])
@pytest.mark.parametrize("medium", [Pictures(), Clips(16.0)], ids=["pictures", "clips"])
def test_a_run_without_output_replaces_no_file(medium, compare, pictures, tmp_path):
    """The chosen name has no file of an earlier run, for any of its images."""
    first = tmp_path / medium.default_output

    def files(path):
        return medium.files(path, compare=compare)

    own = [file for path in numbered(first, pictures) for file in files(path)]
    assert unused(first, pictures, files) == numbered(first, pictures)
    for there in (*combinations(own, 1), tuple(own)):
        for file in there:
            file.touch()
        names = unused(first, pictures, files)
        assert names == numbered(first.with_stem(f"{first.stem}-2"), pictures)
        assert not any(file.exists() for path in names for file in files(path))
        for file in there:
            file.unlink()


def test_several_pictures_are_numbered_from_0():
    assert numbered(Path("a.png"), 1) == [Path("a.png")]
    assert numbered(Path("a.png"), 2) == [Path("a-0.png"), Path("a-1.png")]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, None),
        ({"width": 32, "height": 16, "num-frames": 5, "steps": 4}, None),
        ({"width": None, "height": 17}, "32 × 17 × 5 frames to 32 × 16 × 5 frames"),
        ({"width": 40}, "40 × 16 × 5 frames to 32 × 16 × 5 frames"),
        ({"num-frames": 7}, "32 × 16 × 7 frames to 32 × 16 × 5 frames"),
    ],
    ids=["no-size", "kept", "height", "width", "frames"],
)
def test_a_rounded_size_is_a_note(asked, told):
    """Sides that were not given are the pipeline's own; frames count for videos alone."""
    assert size_note(asked, np.zeros((5, 16, 32, 3), np.uint8)) == (told and f"the pipeline rounded the size {told}")
    image = told if "num-frames" not in asked else None
    expected = image and f"the pipeline rounded the size {image.replace(' × 5 frames', '')}"
    assert size_note(asked, Image.new("RGB", (32, 16))) == expected
