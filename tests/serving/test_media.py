"""File names and frame rates of commands, without a pipeline."""

from itertools import combinations
from pathlib import Path

import pytest

from dit_accel.serving.media import Clips, Pictures, numbered, unused


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
