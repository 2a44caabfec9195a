"""Page of ``dit-accel app``: texts of a run, values of a model, fields as a wish, and access; no server runs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dit_accel.cli import web_app, web_page, web_texts
from dit_accel.cli.web_texts import EXAMPLES, fields_of, in_the_pages_words, target_of, words_note
from dit_accel.errors import ArgumentError, OutOfMemoryError, UnsupportedError
from dit_accel.presets import load_preset
from dit_accel.serving import playground
from dit_accel.serving.media import Clips, Pictures
from dit_accel.serving.playground import Comparison, ComparisonRun, Wish
from dit_accel.tools.demo import DEMOS
from dit_accel.tools.measure.timing import Output

BLACK, WHITE = (Image.new("RGB", (4, 4), (level,) * 3) for level in (0, 255))


def finished(plain=BLACK, fast=WHITE, medium=None, psnr=30.0, notes=(), preset="balanced", kept=False, **size):
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
    table = web_texts.figures(run)
    assert table.splitlines()[0] == "| seconds | plain (cached) | accelerated | speed-up |"
    assert "| denoising | 6.00 | 2.00 | 3.00× |" in table and "| **whole call** | 10.00 | 6.00 | 1.67× |" in table
    assert table.endswith("Decoded with fused kernels.")
    assert "Denoising **3.00×** as fast, PSNR 30.0 dB, 25% computed." in web_texts.status(run)
    assert [each.getpixel((0, 0))[0] for each in web_texts.images(run)] == [0, 255] and not web_texts.video(run, None)
    run = finished(psnr=math.inf, preset="exact")
    assert "| seconds | plain | accelerated |" in web_texts.figures(run)
    assert web_texts.status(run).startswith("Done: exact.") and "as fast, identical" in web_texts.status(run)


def test_names_and_notes_are_text():
    """A file's or a model's name may look like a tag, and keeps its letters."""
    assert web_texts.status(ComparisonRun(None, "loading owner/Model <b>")) == "Loading owner/Model &lt;b&gt; …"
    status = web_texts.status(finished(notes=["of <img src=x>"]))
    assert "of &lt;img src=x&gt;" in status and "<img" not in status


def test_videos_are_written_side_by_side(tmp_path, monkeypatch):
    """Frame by frame into one file with the accelerated sound, at the model's rate; middle frames are compared."""
    written = []
    monkeypatch.setattr(Clips, "write", lambda self, *given: written.append((*given, self.fps)))
    frames = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    run = finished(*(np.zeros((5, 8, 320, 3), np.uint8) + frames + add for add in (0, 100)), medium=Clips(8.0))
    assert [each.getpixel((0, 0))[0] for each in web_texts.images(run)] == [2, 102]
    assert web_texts.video(run, tmp_path) == str(tmp_path / "comparison.mp4")
    ((clip, path, sound, fps),) = written
    assert path == tmp_path / "comparison.mp4" and (sound, fps) == ("sound of accelerated", 8.0)
    assert [(frame[-1, 0, 0], frame[-1, -1, 0]) for frame in clip] == [(index, index + 100) for index in range(5)]


def test_a_rounded_size_is_said():
    run = finished(fast=Image.new("RGB", (496, 320)), width=500, height=333)
    assert "Note: the pipeline rounded the size 500 × 333 to 496 × 320." in web_texts.status(run)


@pytest.mark.parametrize("model", DEMOS)
def test_a_demo_model_has_its_values_before_it_is_loaded(model):
    fields = fields_of(model)
    assert len(set(fields.examples)) == EXAMPLES and not any(words_note(model, each) for each in fields.examples)
    assert fields.numbers["steps"] == 50 and fields.numbers["height"] == fields.numbers["width"] > 0
    assert fields.is_video == (fields.numbers["num_frames"] is not None)


@pytest.mark.parametrize("model", ["demo-flux", "demo-wan", "Qwen/Qwen-Image", "some/model"])
def test_presets_begin_with_three_in_words_and_end_with_papers(model):
    """Names stay in the labels for whoever types them, and only presets that fit the model are there."""
    labels, names = zip(*fields_of(model).presets, strict=True)
    assert names[:3] == ("quality", "balanced", "turbo")
    assert labels[:3] == ("Nearly identical (quality)", "Balanced", "Fast (turbo)")
    assert all(name.lower() in label.lower() for label, name in zip(labels, names, strict=True))
    papers = [label.startswith("Method of a paper") for label in labels]
    assert papers == sorted(papers) and any(papers) == model.startswith("demo-")
    assert not any(name.startswith("video-") for name in names)
    assert not any(name.startswith("wan21") for name in names) or model == "demo-wan"


def test_unknown_words_stand_with_the_known_ones():
    note = words_note("demo-flux", "a crab and a blue star")
    assert note.startswith("demo-flux does not know **crab**. It knows: a, above, ") and "star" in note
    assert words_note("demo-flux", "a blue star") == "" and words_note("some/model", "a crab") == ""


def test_a_preset_with_a_quality_shows_its_calibrated_target():
    """A fixed interval has none."""
    balanced, asked = load_preset("balanced"), load_preset("balanced", target_psnr=30)
    assert target_of(asked) == asked.schedule.bound != target_of(balanced) == balanced.schedule.target_error
    assert target_of(load_preset("exact")) is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ArgumentError("num_frames", "FluxPipeline takes no num_frames"), "Frames: FluxPipeline takes no num_frames"),
        (ArgumentError("image", "give one"), "Use dit-accel generate --image"),
        (OutOfMemoryError("try --batch-size"), "smaller height, width or number of frames"),
        (RuntimeError("broken"), "RuntimeError: broken. The terminal"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_name_the_pages_fields_and_say_what_to_do(error, message):
    """Advice that needs the command names it."""
    text = in_the_pages_words(error)
    assert message in text and "--batch-size" not in text


class Playing:
    """A playground whose runs have three states: a coarse preview, the plain image, and the end."""

    def __init__(self, error=None):
        self.wishes, self.ended, self.error = [], 0, error

    def compare(self, wish):
        if self.error is not None:
            raise self.error
        self.wishes.append(wish)
        try:
            yield ComparisonRun(wish, "plain", preview=WHITE)
            for _ in range(2):
                yield ComparisonRun(wish, "accelerated", outputs={"plain": None}, preview=BLACK)
            yield finished()
        finally:
            self.ended += 1


class Pipe:
    default_sample_size, vae_scale_factor = 4, 8

    def __call__(self, prompt, height=None, width=None, num_inference_steps=28):
        pass


@pytest.fixture(scope="module")
def page():
    pytest.importorskip("gradio")
    pipes = {"some/model": Pipe()}
    stage = SimpleNamespace(compare=lambda wish: stage.playing.compare(wish), pipe=pipes.get)
    built = web_page.Page(stage, "some/model", ["some/model", "demo-wan"], any_model=True).blocks
    built.stage = stage
    return built


def asked(page, playing, *fields, history=()):
    """All that the page changes for a visitor, one after the other."""
    page.stage.playing = playing
    function = next(each.fn for each in page.fns.values() if each.api_name == "make")
    return function(*fields, list(history))


FIELDS = ("a fox", "some/model", "turbo", False, 0.5, 7, 9, 48, 80, 5)


def labelled(page, label):
    (found,) = (each for each in page.blocks.values() if getattr(each, "label", "") == label)
    return found


def changed(page, name, *fields):
    """Changes of a function of the page by the label of the component; those of others by their kind."""
    function = next(each.fn for each in page.fns.values() if getattr(each.fn, "__name__", "") == name)
    changes = function(*fields)
    return {getattr(each, "label", None) or type(each).__name__: value for each, value in changes.items()}


def test_the_fields_of_the_page_are_a_wish(page):
    """Every field sets its argument; an empty one is the model's own value."""
    playing = Playing()
    list(asked(page, playing, *FIELDS))
    list(asked(page, playing, *FIELDS[:3], True, 0.15, None, None, None, None, None))
    rest = (0.5, 7, 9, 48, 80, 5), (None, 0, None, None, None, None)
    assert playing.wishes == [Wish("a fox", "some/model", "turbo", *values) for values in rest]
    next(changes := asked(page, playing, *FIELDS))
    changes.close()
    assert playing.ended == 3, "whatever ends a visitor's stream ends the run"


def test_the_plain_side_is_seen_before_the_end(page):
    """A coarse image, then its own; each is sent once."""
    *states, _ = asked(page, Playing(), *FIELDS)
    sent = [[value for value in each.values() if "value" in value and "label" in value] for each in states]
    assert [[(each["value"], each["label"]) for each in new] for new in sent] == [
        [(WHITE, "Plain, a coarse preview")],
        [(BLACK, "Plain; the accelerated side follows")],
        [],
    ]


def test_the_page_begins_with_the_models_own_values(page):
    """Sizes, steps and the preset's target are numbers that hold, not zeros; frames are for videos."""
    values = {label: labelled(page, label).value for label in ("Steps", "Height", "Width", "target_error")}
    assert values == {"Steps": 28, "Height": 32, "Width": 32, "target_error": 0.15}
    assert not labelled(page, "Frames").visible
    face = next(each.value for each in page.blocks.values() if type(each).__name__ == "Markdown")
    assert "# dit-accel" in face and face.count("/docs/") == 3


def test_another_model_brings_its_own_values(page):
    """Numbers, presets and examples; an example prompt changes, and a visitor's own stays."""
    example = labelled(page, "Prompt").value
    changes = changed(page, "suit_model", "demo-wan", example, "flux-fora")
    assert changes["Prompt"] != example and changes["Preset"]["value"] == "balanced"
    assert {name for _, name in changes["Preset"]["choices"]} >= {"balanced", "wan21-sparge-balanced"}
    numbers = {label: changes[label]["value"] for label in ("Steps", "Height", "Width", "Frames")}
    assert numbers == {"Steps": 50, "Height": 256, "Width": 256, "Frames": 17} and changes["Frames"]["visible"]
    assert changes["target_error"]["value"] == 0.3, "video-balanced's"
    assert changed(page, "suit_model", "demo-wan", "my own", "turbo")["Prompt"] == "my own"


def test_empty_numbers_are_filled_once_a_model_is_loaded(page):
    """Keep what a visitor entered."""
    fill = next(each.fn for each in page.fns.values() if getattr(each.fn, "__name__", "") == "fill_numbers")
    assert fill("some/model", None, 48, None, None) == [28, 48, 32, None]
    assert fill("other/model", None, 48, None, None) == [None, 48, None, None]


def test_a_model_that_is_none_is_an_error_in_the_status(page):
    (message,) = changed(page, "suit_model", "<nonsense>", "a fox", "balanced").values()
    assert message.startswith("**Failed.** Model: &lt;nonsense&gt; is not a pipeline's folder")
    (message,) = changed(page, "suit_preset", "quality", "<nonsense>").values()
    assert message.startswith("**Failed.** Model must be an id such as") and "&lt;nonsense&gt;" in message


def test_a_preset_without_a_target_hides_the_slider(page):
    changes = changed(page, "suit_preset", "exact", "some/model")
    assert not changes["target_error"]["visible"] and "no target_error" in changes["Preset"]["info"]
    changes = changed(page, "suit_preset", "quality", "some/model")
    assert changes["target_error"] | {"visible": True, "value": 0.07} == changes["target_error"]


def test_a_session_remembers_its_latest_results(page):
    """Only a limited number, latest first."""
    *_, last = asked(page, Playing(), *FIELDS, history=[(None, str(index)) for index in range(web_page.REMEMBERED)])
    history = next(value for value in last.values() if isinstance(value, list))
    assert len(history) == web_page.REMEMBERED and history[1][1] == "0" and "fox" in history[0][1]


@pytest.mark.parametrize("error", [UnsupportedError("no model <script>"), RuntimeError("<script>")], ids=type)
def test_an_error_is_text_and_ends_the_status(page, error):
    """It may contain the visitor's input; a mistake in the code ends the status as well."""
    from gradio import Error

    shown = []
    with pytest.raises(Error) as raised:
        for changes in asked(page, Playing(error), *FIELDS):
            shown.append(changes)
    assert "&lt;script&gt;" in str(raised.value) and "<" not in str(raised.value)
    (changes,) = shown
    (status,) = changes.values()
    assert status.startswith("**Failed.** ") and "&lt;script&gt;" in status


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


def test_a_page_asks_nobody(handed_on, monkeypatch):
    """gradio's telemetry is off before gradio is imported."""
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    handed_on("app", "--model", "some/pictures")
    assert web_app.os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_loras_are_of_the_model_that_was_named(run, reached, monkeypatch):
    """Others that the page offers are loaded without, and in the same place."""
    opens = []
    monkeypatch.setattr(
        playground,
        "Playground",
        lambda open_worker: opens.append(open_worker) or SimpleNamespace(load=open_worker, close=lambda: None),
    )
    run("app", "--model", "some/pictures", "--lora", "owner/name", "--dtype", "float16")
    assert reached["loras"] == {"owner/name": 1.0}
    opens[0]("other/pictures")
    assert reached["loras"] == {} and reached["dtype"] == "float16" and reached["model"] == "other/pictures"


@pytest.mark.parametrize("status, after", [("Plain: step 3 of 9 …", "Cancelled."), ("Done: turbo.", "Done: turbo.")])
def test_only_a_run_is_cancelled(status, after):
    assert web_page._cancelled(status) == after
