"""State of the ``dit-accel app`` page for a run's events; no server runs."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from PIL import Image

from dit_accel.cli import web_view
from dit_accel.cli.web_form import Loaded
from dit_accel.presets import load_preset
from dit_accel.serving.media import Clips, Pictures
from dit_accel.tools.playground import Began, Compared, Made, Preview, Step, Wish
from dit_accel.tools.timing import Output

WISH = Wish("a <b>fox</b>", "some/model", "balanced", None, 0, None, None, None, None)


def seen(*events, medium=None, folder=None, wish=WISH):
    """A page after these events."""
    view = web_view.View(wish, {wish.model: Loaded(wish, medium or Pictures())}, folder)
    for event in events:
        view.take(event)
    return view


def made(side, result, seconds, kept=False):
    return Made(side, Output([result], seconds + 4, seconds, 4, sounds=[f"sound of {side}"]), kept)


def compared(psnr=30.0, notes=(), preset="balanced"):
    report = SimpleNamespace(computed_fraction=0.25, notes=list(notes), decoding="with fused kernels")
    return Compared(preset=load_preset(preset), report=report, psnr=psnr, speedup=3.0)


def test_figures_are_of_both_sides():
    """Seconds by stage; a cached plain run says so, and equal images have no PSNR."""
    black, white = (Image.new("RGB", (4, 4), (level,) * 3) for level in (0, 255))
    view = seen(made("plain", black, 6.0, kept=True), made("accelerated", white, 2.0), compared())
    assert view.figures.splitlines()[0] == "| seconds | plain (cached) | accelerated | speed-up |"
    assert "| denoising | 6.00 | 2.00 | 3.00× |" in view.figures
    assert "| **whole call** | 10.00 | 6.00 | 1.67× |" in view.figures
    assert view.figures.endswith("Decoded with fused kernels.")
    assert "Denoising **3.00×** as fast, PSNR 30.0 dB, 25% computed." in view.status
    assert [each.getpixel((0, 0))[0] for each in view.pictures()] == [0, 255] and view.video() is None
    view = seen(
        made("plain", black, 6.0), made("accelerated", black, 2.0, kept=True), compared(math.inf, preset="exact")
    )
    assert "| seconds | plain | accelerated |" in view.figures and "as fast, identical" in view.status
    assert view.status.startswith("Done: exact.")


def test_the_plain_side_is_seen_before_the_end():
    """A coarse image while it runs, then its own; each is sent once, and a cached one not at all."""
    coarse, black = Image.new("RGB", (2, 2)), Image.new("RGB", (4, 4))
    view = seen(Preview(coarse))
    image, label = view.new_preview()
    assert image is coarse and "coarse" in label and view.new_preview() is None
    view.take(made("plain", black, 6.0))
    image, label = view.new_preview()
    assert image is black and "coarse" not in label and view.new_preview() is None
    assert seen(made("plain", black, 6.0, kept=True)).new_preview() is None


def test_a_model_that_is_loading_keeps_its_name():
    assert seen(Began("loading owner/Model <b>")).status == "Loading owner/Model &lt;b&gt; …"


def test_notes_are_text():
    """A file's or a model's name may look like a tag."""
    black = Image.new("RGB", (4, 4))
    view = seen(made("plain", black, 6.0), made("accelerated", black, 2.0), compared(notes=["of <img src=x>"]))
    assert "of &lt;img src=x&gt;" in view.status and "<img" not in view.status


def test_videos_are_written_side_by_side(tmp_path, monkeypatch):
    """Frame by frame into one file with the accelerated sound, at the model's rate; middle frames are compared."""
    written = []
    monkeypatch.setattr(Clips, "write", lambda self, *given: written.append((*given, self.fps)))
    frames = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    clips = [np.zeros((5, 8, 320, 3), np.uint8) + frames + add for add in (0, 100)]
    events = made("plain", clips[0], 6.0), made("accelerated", clips[1], 2.0), compared()
    view = seen(*events, medium=Clips(8.0), folder=tmp_path)
    assert [each.getpixel((0, 0))[0] for each in view.pictures()] == [2, 102]
    assert view.video() == str(tmp_path / "comparison.mp4")
    ((clip, path, sound, fps),) = written
    assert path == tmp_path / "comparison.mp4" and (sound, fps) == ("sound of accelerated", 8.0)
    assert [(frame[-1, 0, 0], frame[-1, -1, 0]) for frame in clip] == [(index, index + 100) for index in range(5)]


def test_steps_are_drawn_now_and_then_and_all_else_at_once(monkeypatch):
    """Plotting takes no time from the steps; the timeline is as long as the whole run."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(web_view, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    view, drawn = seen(), []
    steps = [Step("plain", index, 10, "full", None) for index in range(5)]
    for step in steps:
        drawn.append(view.take(step))
        now.seconds += web_view.REFRESH * 0.6
    assert drawn == [True, False, True, False, True]
    assert view.take(made("plain", Image.new("RGB", (4, 4)), 1.0)) and view.status == "Plain: step 5 of 10."
    lengths = []
    monkeypatch.setattr(
        web_view, "timeline", lambda title, bars, steps: lengths.append((title, len(bars), steps)) or ""
    )
    assert "forecast" in view.timelines() and lengths == [("Plain", 5, 10)] and seen().timelines() == ""


def test_a_rounded_size_is_said():
    """500 × 333 pixels become 496 × 320."""
    black = Image.new("RGB", (496, 320))
    wish = replace(WISH, width=500, height=333)
    view = seen(made("plain", black, 6.0), made("accelerated", black, 2.0), compared(), wish=wish)
    assert "Note: the pipeline rounded the size 500 × 333 to 496 × 320." in view.status
