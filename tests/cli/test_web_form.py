"""Values that the page of ``dit-accel app`` offers for a model, and errors in the words of its fields."""

import pytest

from dit_accel.cli.web_form import EXAMPLES, fields_of, in_the_pages_words, target_of, words_note
from dit_accel.errors import ArgumentError, OutOfMemoryError
from dit_accel.presets import load_preset
from dit_accel.tools.demo import DEMOS


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
    balanced = load_preset("balanced")
    asked = load_preset("balanced", target_psnr=30)
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
