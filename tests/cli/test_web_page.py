"""State of the ``dit-accel app`` page for a run's events, and access checks; no server runs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dit_accel.cli import web_app, web_page
from dit_accel.errors import UnsupportedError
from dit_accel.presets import load_preset
from dit_accel.serving.media import Clips, Pictures
from dit_accel.tools import playground
from dit_accel.tools.playground import Compared, Made, Step, Wish
from dit_accel.tools.timing import Output

WISH = Wish("a <b>fox</b>", "some/model", "balanced", None, 0, None, None, None, None)


def seen(*events, medium=None, folder=None, wish=WISH):
    """A page after these events."""
    view = web_page._View(wish, {wish.model: medium or Pictures()}, folder)
    for event in events:
        view.take(event)
    return view


def made(side, result, seconds, kept=False):
    return Made(side, Output([result], 2 * seconds, seconds, 4), kept)


def compared(psnr=30.0, notes=(), preset="balanced"):
    report = SimpleNamespace(computed_fraction=0.25, notes=list(notes), decoding="with fused kernels")
    return Compared(preset=load_preset(preset), report=report, psnr=psnr, speedup=3.0)


def test_figures_are_of_both_sides():
    """Seconds by stage; a cached plain run says so, and equal images have no PSNR."""
    black, white = (Image.new("RGB", (4, 4), (level,) * 3) for level in (0, 255))
    view = seen(made("plain", black, 6.0, kept=True), made("accelerated", white, 2.0), compared())
    assert "| plain (cached) | 0.00 | 6.00 | 0.00 | 6.00 | 12.00 |" in view.figures
    assert "| speed-up |  | 3.00× |  |  | 3.00× |" in view.figures
    assert view.figures.endswith("PSNR 30.0 dB, 25% computed, decoded with fused kernels")
    assert [each.getpixel((0, 0))[0] for each in view.pictures()] == [0, 255] and view.clips() == [None, None]
    view = seen(
        made("plain", black, 6.0), made("accelerated", black, 2.0, kept=True), compared(math.inf, preset="exact")
    )
    assert "| plain | 0.00 | 6.00 |" in view.figures and "PSNR identical" in view.figures
    assert "Done: exact." in view.status


def test_notes_are_text():
    """A file's or a model's name may look like a tag."""
    black = Image.new("RGB", (4, 4))
    view = seen(made("plain", black, 6.0), made("accelerated", black, 2.0), compared(notes=["of <img src=x>"]))
    assert "of &lt;img src=x&gt;" in view.status and "<img" not in view.status


def test_clips_are_both_written_and_shown_by_their_middle(tmp_path, monkeypatch):
    """Each video has its own frames, at the rate of the model."""
    written = {}
    monkeypatch.setattr(
        Clips, "write", lambda self, clip, path: written.update({path.name: (clip[0, 0, 0, 0], self.fps)})
    )
    clips = [
        np.zeros((5, 4, 4, 3), np.uint8) + np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1) + add for add in (0, 100)
    ]
    events = made("plain", clips[0], 6.0), made("accelerated", clips[1], 2.0), compared()
    view = seen(*events, medium=Clips(8.0), folder=tmp_path)
    assert [each.getpixel((0, 0))[0] for each in view.pictures()] == [2, 102]
    assert view.clips() == [str(tmp_path / "plain.mp4"), str(tmp_path / "accelerated.mp4")]
    assert written == {"plain.mp4": (0, 8.0), "accelerated.mp4": (100, 8.0)}


def test_steps_are_drawn_now_and_then_and_all_else_at_once(monkeypatch):
    """Plotting takes no time from the steps; the timeline is as long as the whole run."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(web_page, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    view, drawn = seen(), []
    steps = [Step("plain", index, 10, "full", None) for index in range(5)]
    for step in steps:
        drawn.append(view.take(step))
        now.seconds += web_page.REFRESH * 0.6
    assert drawn == [True, False, True, False, True]
    assert view.take(made("plain", Image.new("RGB", (4, 4)), 1.0)) and view.status == "Plain: step 5 of 10."
    lengths = []
    monkeypatch.setattr(web_page, "timeline_svg", lambda columns, steps: lengths.append((len(columns), steps)) or "svg")
    assert view.timeline("plain") == "<b>Plain</b>svg" and view.timeline("accelerated") == "" and lengths == [(5, 10)]


class Playing:
    """A playground whose runs are lists of events."""

    def __init__(self, error=None):
        self.wishes, self.cancelled, self.error = [], [], error

    def start(self, wish):
        if self.error is not None:
            raise self.error
        self.wishes.append(wish)
        black, number = Image.new("RGB", (4, 4)), len(self.wishes)
        events = [made("plain", black, 6.0), made("accelerated", black, 2.0), compared()]
        run = iter(events)
        return type("Run", (), {"__iter__": lambda self: run, "cancel": lambda _: self.cancelled.append(number)})()


@pytest.fixture
def asked():
    """Asks a page's endpoint as a visitor does; gives all that it changes."""
    pytest.importorskip("gradio")

    def ask(playing, *fields, session="me", history=(), name="make"):
        page = web_page.build_page(playing, {"some/model": Pictures()}, "some/model", ["some/model"], any_model=True)
        ask.page = page
        function = next(each.fn for each in page.fns.values() if each.api_name == name)
        request = SimpleNamespace(session_hash=session)
        return [*function(*fields, list(history), request)] if name == "make" else function(request)

    return ask


FIELDS = ("a fox", "some/model", "turbo", 0.5, 7, 9, 48, 80, 5)


def test_the_fields_of_the_page_are_a_wish(asked):
    """Every field sets its argument; 0 is the model's own value, except for the seed."""
    playing = Playing()
    asked(playing, *FIELDS)
    asked(playing, *FIELDS[:3], 0, 0, 0, 0, 0, 0)
    assert playing.wishes == [
        Wish("a fox", "some/model", "turbo", 0.5, 7, 9, 48, 80, 5),
        Wish("a fox", "some/model", "turbo", None, 0, None, None, None, None),
    ]
    assert playing.cancelled == [1, 2], "whatever ends a visitor's stream ends the run"


def test_a_page_offers_presets_of_pictures_and_videos_once(asked):
    """A plain name also represents its video form."""
    asked(Playing(), *FIELDS)
    (chosen,) = (each for each in asked.page.blocks.values() if getattr(each, "label", "") == "Preset")
    names = {name for name, _ in chosen.choices}
    assert names >= {"balanced", "turbo"} and not any(name.startswith("video-") for name in names)


def test_a_session_remembers_its_latest_results(asked):
    """Only a limited number, latest first."""
    (*_, last) = asked(Playing(), *FIELDS, history=[(None, str(index)) for index in range(web_page.REMEMBERED)])
    history = next(value for value in last.values() if isinstance(value, list))
    assert len(history) == web_page.REMEMBERED and history[1][1] == "0" and "a fox" in history[0][1]


def test_an_error_is_text(asked):
    """It may contain the visitor's input."""
    from gradio import Error

    with pytest.raises(Error) as error:
        asked(Playing(UnsupportedError("no model <script>")), *FIELDS)
    assert "no model &lt;script&gt;" in str(error.value)


@pytest.mark.parametrize(
    ("host", "share", "free"),
    [
        ("127.0.0.1", False, True),
        ("localhost", False, True),
        ("::1", False, True),
        ("0.0.0.0", False, False),
        ("192.168.0.2", False, False),
        ("127.0.0.1", True, False),
    ],
)
def test_models_are_named_from_this_machine_alone(handed_on, host, share, free):
    """Otherwise any visitor could make the server download or read anything."""
    seen = handed_on("app", "--model", "some/pictures", "--host", host, *(["--share"] if share else []))
    assert seen["any_model"] == free and seen["closed"]


def test_a_page_asks_nobody_and_ends_with_its_server(handed_on, reached, run, monkeypatch):
    """gradio's telemetry is off before gradio is imported; the playground's threads end where it can't listen, too."""
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    handed_on("app", "--model", "some/pictures")
    assert web_app.os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"

    def taken(*_, **__):
        reached.clear()
        return SimpleNamespace(launch=lambda **_: (_ for _ in ()).throw(OSError("taken")))

    monkeypatch.setattr(web_page, "build_page", taken)
    assert run("app", "--model", "some/pictures").exit_code == 2 and reached == {"closed": True}


def test_loras_are_of_the_model_that_was_named(run, reached, monkeypatch):
    """Others that the page offers are loaded without, and in the same place."""
    loads = []
    monkeypatch.setattr(
        playground, "Playground", lambda load, *_: loads.append(load) or SimpleNamespace(load=load, close=lambda: None)
    )
    run("app", "--model", "some/pictures", "--lora", "owner/name", "--dtype", "float16")
    assert reached["loras"] == {"owner/name": 1.0}
    loads[0]("other/pictures")
    assert reached["loras"] == {} and reached["dtype"] == "float16" and reached["model"] == "other/pictures"
