"""Files that commands are to write: their names, and that they can be written, known before any work."""

import os

import numpy as np
import pytest
from PIL import Image

from dit_accel.errors import OptionError
from dit_accel.serving.media import Clips, Pictures, medium_of, require_plausible_output, unused
from dit_accel.serving.outputs import PLOT_SUFFIXES, require_distinct, require_plot, require_writable
from dit_accel.tools import video
from dit_accel.tools.metrics import psnr
from tests.tiny import tiny_pipeline


@pytest.mark.parametrize("link", ["file", "dangling", "folder"])
def test_two_names_of_one_file_are_one_file(tmp_path, link):
    """Links count too, even before the file exists."""
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "a.png"
    if link == "file":
        target.touch()
    other = tmp_path / "b.png" if link != "folder" else tmp_path / "link" / "a.png"
    os.symlink(target if link != "folder" else target.parent, other if link != "folder" else other.parent)
    with pytest.raises(OptionError, match=r"--json: .* is also written by --output"):
        require_distinct([("--output", target), ("--json", other)])
    require_distinct([("--output", target), ("--output", other), ("--json", tmp_path / "c.png")])


@pytest.mark.parametrize("suffix", [*PLOT_SUFFIXES, *map(str.upper, PLOT_SUFFIXES)])
def test_plots_take_a_suffix_in_any_case(tmp_path, suffix):
    require_plot(tmp_path / f"plot{suffix}", "--plot", force=False)


@pytest.mark.parametrize("suffix", [".png", ".JPG", ".webp", ".Mp4", ".GIF", ""])
def test_outputs_take_a_suffix_in_any_case(tmp_path, suffix):
    """Before the model is known, and by the medium that it makes."""
    path = tmp_path / f"made{suffix}"
    require_plausible_output(path, compare=False, force=False)
    medium = Pictures() if suffix in (".png", ".JPG", ".webp") else Clips(8.0)
    medium.require_output(path, compare=True, force=False)


def test_looking_leaves_no_trace(tmp_path):
    """No new file, none changed, and none through a link."""
    there, link = tmp_path / "there.png", tmp_path / "link.png"
    there.write_bytes(b"before")
    os.utime(there, (1, 1))
    os.symlink(tmp_path / "elsewhere.png", link)
    for path in (there, link, tmp_path / "new.png"):
        require_writable(path, "--output", force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"there.png", "link.png"} and not link.exists()
    assert (there.read_bytes(), there.stat().st_mtime) == (b"before", 1)


def test_what_is_there_is_not_replaced_through_a_link(tmp_path):
    """A link to a file is that file, and one to a folder a folder."""
    (tmp_path / "there.png").touch()
    for target, told in (("there.png", "exists"), (".", "is a folder"), ("no/where.png", "does not exist")):
        link = tmp_path / "link.png"
        os.symlink(target, link)
        with pytest.raises(OptionError, match=told):
            require_writable(link, "--output", force=False)
        link.unlink()


def test_a_pipe_is_written_without_a_look(tmp_path):
    """Opening one would wait for its reader; a device is no file to replace either."""
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", "/dev/null"):
        require_writable(path, "--output", force=False)


def test_no_file_of_a_run_is_there_under_an_unused_name(tmp_path):
    """Neither an image nor a file derived from it exists under that name, for any of several images."""

    def names(pictures, compare):
        files = lambda path: Pictures().files(path, compare=compare)  # noqa: E731
        return [path.name for path in unused(tmp_path / "o.png", pictures, files)]

    assert names(1, False) == ["o.png"] and names(2, False) == ["o-0.png", "o-1.png"]
    (tmp_path / "o-plain.png").touch()
    assert names(1, False) == ["o.png"] and names(1, True) == ["o-2.png"]
    (tmp_path / "o-2-compare.png").touch()
    (tmp_path / "o-1.png").touch()
    assert names(1, True) == ["o-3.png"] and names(2, False) == ["o-2-0.png", "o-2-1.png"]


@pytest.mark.parametrize(
    "there", ["o.mp4", "o-plain.mp4", "o-compare.mp4", "o-strip.png", "f/0000.png", "f-plain/0000.png"]
)
def test_clips_that_are_there_stay_unless_they_are_to_be_replaced(tmp_path, there):
    """Files of a comparison too, and frames in folders."""
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).touch()
    path = tmp_path / ("o.mp4" if there.startswith("o") else "f")
    with pytest.raises(OptionError, match="exists"):
        Clips(8.0).require_output(path, compare=True, force=False)
    Clips(8.0).require_output(path, compare=True, force=True)
    if there not in ("o.mp4", "f/0000.png"):
        Clips(8.0).require_output(path, compare=False, force=False)


@pytest.mark.parametrize(("model", "fps"), [("wan", 16), ("cogvideox", 8), ("mochi", 30), ("hunyuan", 24), ("ltx", 24)])
def test_clips_of_a_run_are_written_at_one_rate(monkeypatch, tmp_path, model, fps):
    """Plain, accelerated and side by side: the family's rate unless another is given."""
    rates = []
    monkeypatch.setattr(video, "write_clip", lambda clip, path, rate, folder=None: rates.append(rate))
    clip, medium = np.zeros((5, 16, 16, 3), dtype=np.uint8), medium_of(tiny_pipeline(model))
    medium.write(clip, tmp_path / "o.mp4")
    medium.write_comparison(clip, clip, ("plain", "accelerated"), tmp_path / "o.mp4")
    assert rates == [fps] * 3


@pytest.mark.parametrize("medium", [Pictures(), Clips(8.0)], ids=["pictures", "clips"])
def test_quality_is_that_of_everything_made(medium):
    """Figures cover all outputs: one that differs among several lowers both."""
    generator = np.random.default_rng(0)
    plain = generator.integers(0, 200, (2, 16, 16, 3), dtype=np.uint8)
    fast = np.stack([plain[0], plain[1] + 40])
    sides = [[Image.fromarray(each) for each in side] for side in (plain, fast)]
    if isinstance(medium, Clips):
        sides = [[each[None] for each in side] for side in (plain, fast)]
    quality = medium.quality(*sides)
    assert quality["psnr_db"] == pytest.approx(psnr(plain, fast)) and not quality["identical"] and quality["ssim"] < 1
    assert medium.quality(sides[0], sides[0]) == {"psnr_db": None, "ssim": pytest.approx(1.0), "identical": True}
