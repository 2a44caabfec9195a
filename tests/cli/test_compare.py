"""dit-accel compare on a tiny pipeline saved to disk: files, messages and exit codes."""

import json
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from PIL import Image

from dit_accel.cli import compare
from dit_accel.serving.loading import load_pipeline
from dit_accel.tools.demo import tuning_prompts
from dit_accel.tools.measure.compare import Method
from tests.models.tiny.sounds import longcat_audio
from tests.tiny import tiny_pipeline

SMALL = ("--steps", "6", "--height", "32", "--width", "32", "--settings", "1")


def test_a_comparison_is_written_and_goes_on(run, model, tmp_path):
    """Table, JSON, plots and images; a second run with one more preset measures only that one, and keeps images."""
    (tmp_path / "prompts.txt").write_text("a fox\ntwo whales\n")
    asked = ("compare", "-m", model, "--prompts", "prompts.txt", *SMALL)
    result = run(*asked, "--presets", "turbo", "--peers", "fewer-steps", "--images")
    assert result.exit_code == 0, result.output
    names = {f"comparison{end}" for end in (".json", ".md", ".png", "-time.png", "-sheet.png", "-images")}
    assert {path.name for path in tmp_path.iterdir()} == names | {"prompts.txt"}
    first = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["name"] for row in first["results"]] == ["turbo", "3 steps"]
    assert "turbo" in result.stdout and "speed-up" in result.stdout
    assert run(*asked, "--presets", "turbo,quality", "--peers", "fewer-steps", "--images").exit_code == 0
    second = json.loads((tmp_path / "comparison.json").read_text())
    assert [row for row in second["results"] if row["name"] != "quality"] == first["results"]
    names = {f"00{prompt}-{name}.png" for prompt in range(2) for name in ("plain", "turbo", "3-steps", "quality")}
    assert {path.name for path in (tmp_path / "comparison-images").iterdir()} == names
    with Image.open(tmp_path / "comparison-sheet.png") as sheet:
        assert sheet.width >= 3 * 32 and sheet.height > 2 * 32
    other = run(*asked, "--peers", "none", "--seed", 1)
    assert other.exit_code == 2 and "differs in seed (seed: 0 there, 1 now)" in other.stderr


def test_there_are_no_images_of_sound_alone(run, tmp_path):
    """The option is refused before any setting runs; without it, tables of sound are written and no plots."""
    longcat_audio().save_pretrained(tmp_path / "model")
    asked = ("compare", "-m", "model", "-p", "rain", "--steps", "4", "--call", "audio_duration_s=1.0")
    asked += ("--presets", "exact", "--peers", "none", "--repeats", "1")
    result = run(*asked, "--images")
    assert result.exit_code == 2 and "--images: LongCatAudioDiTPipeline makes sound alone" in result.stderr
    result = run(*asked)
    assert result.exit_code == 0 and "SI-SDR dB" in (tmp_path / "comparison.md").read_text(), result.output
    assert {path.name for path in tmp_path.iterdir()} == {"model", "comparison.json", "comparison.md"}


def test_a_pipeline_is_gone_before_it_is_loaded_again(run, model, monkeypatch):
    """A device may not have room for two; here a method changes weights, so the comparison loads a fresh pipeline."""
    loaded = []

    def load(*arguments, **options):
        assert all(transformer() is None for transformer in loaded)
        pipe = load_pipeline(*arguments, **options)
        loaded.append(weakref.ref(pipe.transformer))
        return pipe

    @contextmanager
    def vandal(subject):
        with torch.no_grad():
            subject.pipe.transformer.proj_out.weight.mul_(2)
        yield {}

    monkeypatch.setattr(compare, "load_pipeline", load)
    monkeypatch.setattr(compare, "_methods", lambda *_: ([Method("vandal", "vandal", vandal)], {}))
    result = run("compare", "-m", model, "-p", "a red fox", *SMALL)
    assert result.exit_code == 0 and len(loaded) == 2, result.output


def test_methods_are_those_that_were_asked_for(monkeypatch):
    """Presets by name, else the three levels of the model's kind and targets between; any number of other methods."""
    asked = {}
    bench = SimpleNamespace(pipe=tiny_pipeline("wan"), subject=SimpleNamespace(steps=6))

    def ours(pipe, presets, target_of=None):
        asked.setdefault("ours", []).append((list(presets), target_of))
        return [f"target {index}" for index in range(9)] if target_of else list(presets)

    def theirs(pipe, steps, names, settings):
        asked["theirs"] = steps, names, settings
        return ["peer"], {"other": "missing"}

    monkeypatch.setattr("dit_accel.tools.measure.compare.our_methods", ours)
    monkeypatch.setattr("dit_accel.tools.measure.compare.peer_methods", theirs)
    found = compare._methods(bench, ["turbo", "exact"], "some/model", ["dbcache"], 3)
    assert found == (["turbo", "exact", "peer"], {"other": "missing"})
    assert asked["theirs"] == (6, ["dbcache"], 3)
    levels = ["video-quality", "video-balanced", "video-turbo"]
    methods, _ = compare._methods(bench, [], "some/model", None, 3)
    assert methods == [*levels, "target 0", "target 4", "target 8", "peer"] and asked["theirs"] == (6, None, 3)
    assert asked["ours"][1:] == [([], "video-balanced"), (levels, None)]


def test_calibration_sees_no_prompt_that_is_compared(handed_on, tmp_path):
    """Calibrated methods must not know their test prompts."""
    first, second, *_ = tuning_prompts("some/model")
    for prompts, expected in (([first], second), ([second], first), ([second, first], tuning_prompts("some/model")[2])):
        (tmp_path / "mine.txt").write_text("\n".join(prompts))
        seen = handed_on("compare", "--prompts", "mine.txt", "-m", "some/pictures", "--image", "black.png")
        assert [prompt for prompt, _ in seen["prompts"]] == prompts and seen["tuning_prompt"] == expected
