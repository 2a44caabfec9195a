"""Names of what commands write, and frame rates, without a pipeline."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dit_accel.cli.inspect import _middle
from dit_accel.cli.media import Clips, Pictures, numbered, unused


@pytest.mark.parametrize("pictures", [1, 2])
@pytest.mark.parametrize("compare", [False, True], ids=["alone", "compared"])
@pytest.mark.parametrize("medium", [Pictures(), Clips(16.0)], ids=["pictures", "clips"])
def test_a_run_without_output_replaces_no_file(medium, compare, pictures, tmp_path):
    """Whichever file of an earlier run is there, of any of its pictures: the name that is taken has none of them."""
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


@pytest.mark.parametrize("factor", [4, 8])
@pytest.mark.parametrize("latent", [1, 2, 3, 6])
def test_symbols_are_drawn_over_the_frame_that_they_are_of(latent, factor):
    """The first latent frame is one frame of the clip and each other ``factor``; the middle one is shown."""
    frames = 1 + (latent - 1) * factor
    clip = np.zeros((frames, 2, 2, 3), np.uint8) + np.arange(frames, dtype=np.uint8)[:, None, None, None]
    picture, place, count = _middle(SimpleNamespace(vae_scale_factor_temporal=factor), clip)
    assert (place, count) == (latent // 2, latent)
    shown = int(np.asarray(picture)[0, 0, 0])
    assert (shown == 0) if place == 0 else (shown - 1) // factor + 1 == place


def test_several_pictures_are_numbered_from_0():
    assert numbered(Path("a.png"), 1) == [Path("a.png")]
    assert numbered(Path("a.png"), 2) == [Path("a-0.png"), Path("a-1.png")]
