"""Page of ``dit-accel app``: its fields as a wish, its values for a model, and access checks; no server runs."""

from types import SimpleNamespace

import pytest

from dit_accel.cli import web_app, web_page
from dit_accel.errors import UnsupportedError
from dit_accel.serving import playground
from dit_accel.serving.playground import ComparisonRun, Wish
from tests.cli.test_web_view import BLACK, WHITE, finished


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
    """A pipeline of a family that is not known."""

    default_sample_size, vae_scale_factor = 4, 8

    def __call__(self, prompt, height=None, width=None, num_inference_steps=28):
        pass


@pytest.fixture(scope="module")
def page():
    """A page whose playground can be replaced."""
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
    assert playing.wishes == [
        Wish("a fox", "some/model", "turbo", 0.5, 7, 9, 48, 80, 5),
        Wish("a fox", "some/model", "turbo", None, 0, None, None, None, None),
    ]
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
