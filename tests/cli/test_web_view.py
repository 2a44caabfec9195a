"""Texts and images of the ``dit-accel app`` page for the state of a run; no server runs."""

import math
from types import SimpleNamespace

import numpy as np
from PIL import Image

from dit_accel.cli import web_view
from dit_accel.presets import load_preset
from dit_accel.serving.media import Clips, Pictures
from dit_accel.serving.playground import Comparison, ComparisonRun, Wish
from dit_accel.tools.measure.timing import Output

BLACK, WHITE = (Image.new("RGB", (4, 4), (level,) * 3) for level in (0, 255))


def finished(plain=BLACK, fast=WHITE, medium=None, psnr=30.0, notes=(), preset="balanced", kept=False, **size):
    """A run that has ended."""
    outputs = {
        side: Output([result], seconds + 4, seconds, 4, sounds=[f"sound of {side}"])
        for side, result, seconds in (("plain", plain, 6.0), ("accelerated", fast, 2.0))
    }
    report = SimpleNamespace(computed_fraction=0.25, notes=list(notes), decoding="with fused kernels")
    end = Comparison(load_preset(preset), psnr, 3.0, report)
    wish = Wish("a <b>fox</b>", "some/model", **size)
    return ComparisonRun(wish, outputs=outputs, is_kept=kept, medium=medium or Pictures(), comparison=end)


def test_figures_are_of_both_sides():
    """Seconds by stage; a cached plain run says so, and equal images have no PSNR."""
    run = finished(kept=True)
    table = web_view.figures(run)
    assert table.splitlines()[0] == "| seconds | plain (cached) | accelerated | speed-up |"
    assert "| denoising | 6.00 | 2.00 | 3.00× |" in table
    assert "| **whole call** | 10.00 | 6.00 | 1.67× |" in table
    assert table.endswith("Decoded with fused kernels.")
    assert "Denoising **3.00×** as fast, PSNR 30.0 dB, 25% computed." in web_view.status(run)
    assert [each.getpixel((0, 0))[0] for each in web_view.images(run)] == [0, 255] and not web_view.video(run, None)
    run = finished(psnr=math.inf, preset="exact")
    assert "| seconds | plain | accelerated |" in web_view.figures(run)
    assert web_view.status(run).startswith("Done: exact.") and "as fast, identical" in web_view.status(run)


def test_names_and_notes_are_text():
    """A file's or a model's name may look like a tag, and keeps its letters."""
    assert web_view.status(ComparisonRun(None, "loading owner/Model <b>")) == "Loading owner/Model &lt;b&gt; …"
    status = web_view.status(finished(notes=["of <img src=x>"]))
    assert "of &lt;img src=x&gt;" in status and "<img" not in status


def test_videos_are_written_side_by_side(tmp_path, monkeypatch):
    """Frame by frame into one file with the accelerated sound, at the model's rate; middle frames are compared."""
    written = []
    monkeypatch.setattr(Clips, "write", lambda self, *given: written.append((*given, self.fps)))
    frames = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    run = finished(*(np.zeros((5, 8, 320, 3), np.uint8) + frames + add for add in (0, 100)), medium=Clips(8.0))
    assert [each.getpixel((0, 0))[0] for each in web_view.images(run)] == [2, 102]
    assert web_view.video(run, tmp_path) == str(tmp_path / "comparison.mp4")
    ((clip, path, sound, fps),) = written
    assert path == tmp_path / "comparison.mp4" and (sound, fps) == ("sound of accelerated", 8.0)
    assert [(frame[-1, 0, 0], frame[-1, -1, 0]) for frame in clip] == [(index, index + 100) for index in range(5)]


def test_a_rounded_size_is_said():
    """500 × 333 pixels become 496 × 320."""
    run = finished(fast=Image.new("RGB", (496, 320)), width=500, height=333)
    assert "Note: the pipeline rounded the size 500 × 333 to 496 × 320." in web_view.status(run)
