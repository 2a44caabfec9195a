"""Without matplotlib, imageio-ffmpeg and gradio the rest works; features that need them fail before any computation."""

import re
import sys

import numpy as np
import pytest
from PIL import Image

from dit_accel.errors import UnsupportedError
from dit_accel.tools.extras import EXTRAS
from dit_accel.tools.media.figures import frontier_plot
from dit_accel.tools.media.strips import comparison_clip, comparison_strip
from dit_accel.tools.media.video import write_clip
from tests.clips import read_clip

MATPLOTLIB = r"needs matplotlib, which is not installed: pip install -e '\.\[plots\]' in a checkout"
FFMPEG = r"needs imageio-ffmpeg, which is not installed: pip install -e '\.\[video\]' in a checkout"
CLIP = np.random.default_rng(0).integers(0, 255, (3, 32, 48, 3), dtype=np.uint8)


@pytest.fixture
def bare(monkeypatch):
    """An installation without extras, except those that diffusers imports whenever their metadata exist."""
    for package in EXTRAS.keys() - {"peft", "torchao"}:
        monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: frontier_plot([("a", 0.3, 50.0)], path, highlight="a"), f"a figure {MATPLOTLIB}"),
        (lambda path: write_clip(CLIP, path, 8), rf"path \S+video.mp4 {FFMPEG}"),
    ],
    ids=["plot", "mp4"],
)
def test_a_file_names_its_extra(bare, tmp_path, write, message):
    """The error names the missing package and how to install it, and nothing is written."""
    with pytest.raises(UnsupportedError, match=message):
        write(tmp_path / "video.mp4")
    assert list(tmp_path.iterdir()) == []


def test_gif_frames_and_comparisons_need_no_extra(bare, tmp_path):
    """Frames keep every bit, a gif its shape, and captions use Pillow's own font."""
    write_clip(CLIP, tmp_path / "frames", 8)
    np.testing.assert_array_equal(read_clip(tmp_path / "frames"), CLIP)
    write_clip(CLIP, tmp_path / "clip.gif", 8)
    assert read_clip(tmp_path / "clip.gif").shape == CLIP.shape
    assert len(comparison_clip(CLIP, CLIP, ("plain", "fast"))) == 3
    assert comparison_strip(*[Image.fromarray(CLIP[0])] * 2, ("plain", "fast")).width > 3 * 320


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "-p", "a", "--plot", "run.png"), MATPLOTLIB),
        (("inspect", "-p", "a", "-o", "inspection"), MATPLOTLIB),
        (("compare", "-p", "a"), MATPLOTLIB),
        (("tune", "--target-psnr", "40"), MATPLOTLIB),
        (("generate", "-p", "a", "--output", "clip.mp4"), f"--output clip.mp4 {FFMPEG}"),
        (("app",), r"needs gradio, which is not installed: pip install -e '\.\[app\]' in a checkout"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands_ask_for_an_extra_before_they_load_a_model(bare, run, arguments, message, tmp_path):
    """One line, exit code 2, no files; the model, which does not exist, is not looked for."""
    result = run(*arguments, "--model", "no/such/model")
    (error,) = (line for line in result.stderr.splitlines() if "`torchao`" not in line)  # a warning of diffusers
    assert result.exit_code == 2 and re.search(message, error) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("generate",), ("inspect", "-o", "inspection")], ids=["generate", "inspect"])
def test_a_clip_of_no_name_asks_for_ffmpeg_before_it_runs(command, run, saved, monkeypatch):
    """Both write an mp4 by default, and say what that needs before the pipeline is called."""
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    for module in ("generate", "inspect"):
        monkeypatch.setattr(f"dit_accel.cli.{module}.timed_call", lambda *_: pytest.fail("the pipeline ran"))
    result = run(*command, "-p", "a", "--model", saved("wan"), "--steps", "2")
    assert result.exit_code == 2, result.output
    assert ".mp4 needs imageio-ffmpeg" in result.stderr
