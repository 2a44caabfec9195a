"""Without matplotlib, imageio-ffmpeg and gradio the rest works; features that need them fail before any computation."""

import sys

import numpy as np
import pytest
from PIL import Image

from dit_accel.errors import UnsupportedError
from dit_accel.tools.extras import EXTRAS, require_extra
from dit_accel.tools.media.figures import frontier_plot
from dit_accel.tools.media.strips import comparison_clip, comparison_strip
from dit_accel.tools.media.video import write_clip
from tests.clips import read_clip

MATPLOTLIB = r"needs matplotlib, which is not installed: pip install 'dit-accel\[plots\]'"
FFMPEG = r"needs imageio-ffmpeg, which is not installed: pip install 'dit-accel\[video\]'"
CLIP = np.random.default_rng(0).integers(0, 255, (3, 32, 48, 3), dtype=np.uint8)


@pytest.fixture
def bare(monkeypatch):
    """An installation without extras, except those that diffusers imports whenever their metadata exist."""
    for package in EXTRAS.keys() - {"peft", "torchao"}:
        monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)


@pytest.mark.parametrize("package", list(EXTRAS))
def test_an_extra_that_is_there_is_no_error(package):
    """The tests' own installation has them all."""
    require_extra(package, "--option")


def test_figures_name_their_extra(bare, tmp_path):
    """The error names the missing package and how to install it, and nothing is written."""
    with pytest.raises(UnsupportedError, match=f"a figure {MATPLOTLIB}"):
        frontier_plot([("ours", 0.3, 50.0)], tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []


def test_mp4_names_its_extra(bare, tmp_path):
    """Nothing is written."""
    path = tmp_path / "clip.mp4"
    with pytest.raises(UnsupportedError, match=rf"path \S+clip.mp4 {FFMPEG}"):
        write_clip(CLIP, path, 8)
    assert not path.exists()


def test_gif_frames_and_comparisons_need_no_extra(bare, tmp_path):
    """Frames keep every bit, a gif its shape, and captions use Pillow's own font."""
    write_clip(CLIP, tmp_path / "frames", 8)
    np.testing.assert_array_equal(read_clip(tmp_path / "frames"), CLIP)
    write_clip(CLIP, tmp_path / "clip.gif", 8)
    assert read_clip(tmp_path / "clip.gif").shape == CLIP.shape
    assert len(comparison_clip(CLIP, CLIP, ("plain", "fast"))) == 3
    assert comparison_strip(*[Image.fromarray(CLIP[0])] * 2).width > 3 * 320


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "-p", "a", "--plot", "run.png"),
        ("inspect", "-p", "a", "-o", "inspection"),
        ("compare", "-p", "a"),
        ("tune", "--target-psnr", "40"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_ask_for_matplotlib_before_they_load_a_model(bare, run, arguments, tmp_path):
    """One line, exit code 2, no files; the model, which does not exist, is not looked for."""
    result = run(*arguments, "--model", "no/such/model")
    assert result.exit_code == 2
    assert "needs matplotlib" in result.stderr and "dit-accel[plots]" in result.stderr
    assert result.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_generate_asks_for_ffmpeg_before_it_loads_a_model(bare, run, tmp_path):
    """The name of an mp4 in --output is enough to raise the error."""
    result = run("generate", "-p", "a", "--model", "no/such/model", "--output", "clip.mp4")
    assert result.exit_code == 2
    assert "--output clip.mp4 needs imageio-ffmpeg" in result.stderr and "dit-accel[video]" in result.stderr


def test_the_app_asks_for_gradio_before_it_loads_a_model(bare, run):
    result = run("app", "--model", "no/such/model")
    assert result.exit_code == 2
    needs = "dit-accel app needs gradio, which is not installed: pip install 'dit-accel[app]'"
    assert result.stderr == f"error: {needs}\n"


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """Folder of a tiny video pipeline."""
    from tests.tiny import tiny_pipeline

    folder = tmp_path_factory.mktemp("models") / "wan"
    tiny_pipeline("wan").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", [("generate",), ("inspect", "-o", "inspection")], ids=["generate", "inspect"])
def test_a_clip_of_no_name_asks_for_ffmpeg_before_it_runs(command, run, wan, monkeypatch):
    """Both write an mp4 by default, and say what that needs before the pipeline is called."""
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    for module in ("generate", "inspect"):
        monkeypatch.setattr(f"dit_accel.cli.{module}.timed_call", lambda *_: pytest.fail("the pipeline ran"))
    result = run(*command, "-p", "a", "--model", wan, "--steps", "2")
    assert result.exit_code == 2, result.output
    assert ".mp4 needs imageio-ffmpeg" in result.stderr


def test_generate_compares_clips_in_folders_of_frames_without_extras(bare, run, wan, tmp_path):
    """Frames, the plain ones, both side by side and the strip."""
    small = ("--steps", "4", "--height", "32", "--width", "32", "--num-frames", "5")
    result = run("generate", "-p", "a", "--model", wan, *small, "--compare", "--output", "frames")
    assert result.exit_code == 0, result.output
    written = {"frames", "frames-plain", "frames-compare", "frames-strip.png"}
    assert {path.name for path in tmp_path.iterdir()} == written
