"""Files that commands write, and the settings in them; nothing is loaded, run or plotted."""

import errno
import json
import math
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from dit_accel.cli import comparison, generate
from dit_accel.cli.comparison import Side, Sides
from dit_accel.presets import load_preset
from dit_accel.tools import files
from dit_accel.tools.measure.timing import Output

PICTURES = "some/pictures"
IMAGES = [Image.new("RGB", (16, 16))]
TUNE, COMPARE = ("tune", "--target-psnr", 30), ("compare", "--prompt", "a")


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("generate", "--prompt", "a", "--output", "o.png"), "o.png"),
        (("generate", "--prompt", "a", "--output", "o.png", "--compare"), "o-plain.png"),
        (("generate", "--prompt", "a", "--json", "o.json"), "o.json"),
        (("inspect", "--prompt", "a", "--output", "run"), "run/timeline.png"),
        (("inspect", "--prompt", "a", "--output", "run"), "run/report.json"),
        (("inspect", "--prompt", "a", "--output", "run"), "run/picture.png"),
        (("inspect", "--prompt", "a", "--output", "run"), "run/symbols-transformer_blocks.0.png"),
        (TUNE, "tuned.yaml"),
        (TUNE, "tuned.png"),
        (COMPARE, "comparison.md"),
        (COMPARE, "comparison-time.png"),
        (("presets", "schema", "--output", "s.json"), "s.json"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(map(str, given)),
)
def test_force_is_what_replaces_files(run, reached, tmp_path, command, file):
    """Every command keeps existing files, even empty ones, and replaces them only with --force."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    model = () if command[0] == "presets" else ("--model", PICTURES)
    image = ("--image", "i.png") if model else ()
    Image.new("RGB", (16, 16)).save(tmp_path / "i.png")
    refused = run(*command, *model, *image)
    assert refused.exit_code == 2 and f"{file} exists" in refused.stderr
    assert (tmp_path / file).read_bytes() == b"" and run(*command, *model, *image, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("generate", "--prompt", "a"), "output.png"),
        (("generate", "--prompt", "a", "--compare"), "output.png"),
        (("generate", "--prompt", "a", "--json", "o.json"), "output.png"),
        (("inspect", "--prompt", "a", "--output", "."), "picture.png"),
        (("presets", "schema", "--output", "s.json"), "s.json"),
        (("presets", "schema"), "output"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fills_up_in_the_run_is_one_line(run, reached, tmp_path, monkeypatch, command, file, code):
    """It names the file and the reason, and nothing half written stays."""

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "replace", fail)
    if file == "output":  # standard output is a file on this disk
        monkeypatch.setattr("dit_accel.models.presets.preset_schema", fail)
    model = () if command[0] == "presets" else ("--model", PICTURES, "--image", "i.png")
    Image.new("RGB", (16, 16)).save(tmp_path / "i.png")
    result = run(*command, *model)
    assert result.exit_code == 1
    assert re.fullmatch(rf"error: \S*{file} can't be written: {os.strerror(code)}(; free .*)?\n", result.stderr)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"i.png"}


@pytest.mark.parametrize(
    ("command", "there"), [(TUNE, "tuned-tuning/state.json"), (COMPARE, "comparison.json")], ids=["tune", "compare"]
)
def test_what_goes_on_replaces_its_own_files(run, reached, tmp_path, command, there):
    """An interrupted tuning or comparison replaces its own files without --force."""
    for file in (there, "tuned.yaml", "tuned.png", "comparison.md", "comparison.png", "comparison-time.png"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    Image.new("RGB", (16, 16)).save(tmp_path / "i.png")
    result = run(*command, "--model", PICTURES, "--image", "i.png")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [("generate", "--compare"), ("compare", "--force")], ids=["generate", "compare"])
def test_whole_runs_are_repeated_where_weights_are_moved(handed_on, command):
    """Offloading moves weights at the start of a run, which a few steps of one would count too often."""
    base = (*command, "--prompt", "a", "--model", PICTURES, "--image", "black.png")
    ways = ("none", "model", "group", "sequential")
    assert [handed_on(*base, "--offload", way)["whole"] for way in ways] == [False, True, True, True]


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        (("--negative-prompt", "blue"), {"negative-prompt": "blue"}),
        (("--steps", 7), {"steps": 7}),
        (("--height", 48), {"height": 48}),
        (("--width", 80), {"width": 80}),
        (("--num-frames", 9), {"num-frames": 9}),
        (("--guidance", 0.0), {"guidance": 0.0}),
        (("--seed", 0), {"seed": 0}),
        (("--seed", 5), {"seed": 5}),
        (("--image", "grey.png"), {"image": "grey.png"}),
        (("--call", "max_sequence_length=8"), {"call": {"max_sequence_length": 8}}),
        (("--lora", "owner/name:0.5"), {"lora": {"owner/name": 0.5}}),
        (("--quantize", "int8"), {"quantize": "int8"}),
        (("--dtype", "float16"), {"dtype": "float16"}),
        (("--fps", 12.5), {"fps": 12.5}),
        (("--device", "cuda:1"), {}),
        (("--offload", "model"), {}),
        (("--batch-size", 3), {}),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_what_changes_a_file_is_a_setting_of_its_line(run, tmp_path, monkeypatch, given, setting):
    """The command's options apply to lines without their own; the manifest has every setting that affects a result."""
    started = {}
    monkeypatch.setattr(generate, "Worker", lambda setup, console: started.update(setup=setup))

    def note(engine, jobs, folder, facts, console, *, batch_size, force):
        started.update(rows=[facts | job.settings for job in jobs], batch_size=batch_size, force=force)

    monkeypatch.setattr(generate, "run_jobs", note)
    Image.new("RGB", (16, 16), (99,) * 3).save(tmp_path / "grey.png")
    (tmp_path / "two.txt").write_text("a cat\na dog\n")
    result = run("generate", "--model", PICTURES, "--prompts", "two.txt", "--output-dir", "out", "--force", *given)
    assert result.exit_code == 0, result.output
    common = {"model": PICTURES, "image": None, "seed": 0} | setting
    assert started["rows"] == [common | {"prompt": prompt} for prompt in ("a cat", "a dog")]
    size = 3 if "--batch-size" in given else 1
    assert started["force"] and started["batch_size"] == started["setup"].batch_size == size
    assert (started["setup"].image is not None) == ("--image" in given)
    assert (started["setup"].fps, started["setup"].call) == (setting.get("fps"), setting.get("call", {}))


def test_the_json_of_a_run_says_what_was_asked_for(run, reached, tmp_path):
    """Model, preset, prompt, seed and other arguments are the command's, and null represents a plain run."""
    Image.new("RGB", (16, 16)).save(tmp_path / "i.png")
    common = ("generate", "--prompt", "a", "--model", PICTURES, "--image", "i.png", "--json", "j.json", "--force")
    unknown = dict.fromkeys(("plain_seconds", "plain_call_seconds", "speedup", "psnr_db", "ssim", "identical"))
    for given, expected in {
        ("--seed", 7, "--preset", "turbo"): {"seed": 7, "preset": "turbo", "computed_fraction": 0.5} | unknown,
        ("--preset", "none"): {"seed": 0, "preset": None, "computed_fraction": 1.0, "report": None},
        ("--call", "max_sequence_length=8"): {"call": {"max_sequence_length": 8}},
        ("--compare",): {"speedup": 1.0, "speedup_spread": [1.0, 1.0], "plain_call_seconds": 2.0},
    }.items():
        result = run(*common, *given)
        assert result.exit_code == 0, result.output
        facts = json.loads((tmp_path / "j.json").read_text())
        assert facts.items() >= {"model": PICTURES, "prompt": "a", **expected}.items()


@pytest.mark.parametrize("command", [("generate",), ("inspect", "--output", "run")], ids=["generate", "inspect"])
def test_a_rounded_size_is_printed(run, reached, tmp_path, command):
    Image.new("RGB", (16, 16)).save(tmp_path / "i.png")
    result = run(*command, "--prompt", "a", "--model", PICTURES, "--image", "i.png", "--width", 20, "--height", 16)
    assert result.exit_code == 0 and "note: the pipeline rounded the size 20 × 16 to 16 × 16\n" in result.stdout


def test_seconds_of_a_comparison_are_of_the_loop_and_of_the_call():
    images = (np.full((16, 16, 3), level, np.uint8) for level in (0, 9))
    plain, fast = (Side(Output([image], 9.0, 8.0, 4), [8.0, 6.0, 7.0]) for image in images)
    summary = comparison.summary_of(Sides(plain, fast, None))
    assert (summary["plain_seconds"], summary["plain_call_seconds"]) == (7.0, 9.0)
    assert summary["plain_seconds_each"] == [8, 6, 7]


@pytest.mark.parametrize(
    ("factor", "ratio", "shown"),
    [(1.0, 0.0, "100.0 dB"), (0.5, -6.0, "100.0 dB"), (math.nan, None, "not finite"), (None, "none", None)],
    ids=["equal", "quieter", "nan", "no-sound"],
)
def test_the_sound_of_a_video_is_compared(capsys, factor, ratio, shown):
    """Its metrics are there only where there is sound, and null replaces NaN."""
    sound = torch.sin(torch.arange(99.0)).expand(2, 99)
    heard = [[], []] if factor is None else [[sound], [factor * sound]]
    sides = Sides(*(Side(Output(IMAGES, 9.0, 8.0, 4, sounds=each), [8.0]) for each in heard), None)
    summary = comparison.summary_of(sides)
    level = summary.get("rms_ratio_db", "none")
    assert level == ratio or level == pytest.approx(ratio, abs=0.1)
    comparison.print_summary(Console(width=200), json.loads(json.dumps(summary)), load_preset("balanced"), sides)
    out = capsys.readouterr().out
    assert re.search(f"SI-SDR +{shown}", out) if shown else "SI-SDR" not in out


def test_times_that_were_disturbed_are_told_below_the_figures(capsys):
    """Disturbances come from other programs on the machine; the whole call has the loop's median."""
    for seconds, told in (([8.0, 8.0, 8.0], False), ([80.0, 8.0, 8.0], True)):
        sides = Sides(*(Side(Output(IMAGES, each[0] + 1, each[0], 4), each) for each in ([8.0] * 3, seconds)), None)
        comparison.print_summary(Console(width=200), comparison.summary_of(sides), load_preset("balanced"), sides)
        out = capsys.readouterr().out
        assert ("raise --repeats" in out) == told
        assert re.search(r"whole call +9\.00 s +9\.00 s\n", out) and re.search(r"of the call +1\.00×", out)


@pytest.mark.parametrize("count, told", [(0, ""), (1, "'x0'. Its words: "), (8, "'x7'. Its"), (9, "'x7', …. Its")])
def test_words_that_a_demo_model_does_not_know_are_told(capsys, count, told):
    """The first eight of them, with all that it knows."""
    prompt = " ".join(["star", *(f"x{index}" for index in range(count))])
    generate._note_unknown_words(Console(width=9999), "demo-flux", prompt)
    out = capsys.readouterr().out
    assert told in out and bool(out) == (count > 0) and "x8" not in out


@pytest.mark.parametrize(
    "notes, modes, advised", [([], {"full": 3}, True), (["why"], {"full": 3}, False), ([], {"dispatch": 1}, False)]
)
def test_a_run_that_says_why_it_computed_every_step_gets_no_other_advice(capsys, notes, modes, advised):
    """More steps would not help there, nor where some were forecast."""
    fast = Side(Output([], 9.0, 8.0, 4), [8.0])
    report = SimpleNamespace(computed_fraction=1.0, to_json=lambda: {"notes": notes, "steps_by_mode": modes})
    sides = Sides(None, fast, report)
    comparison.print_summary(Console(width=200), comparison.summary_of(sides), load_preset("balanced"), sides)
    out = capsys.readouterr().out
    assert ("with more --steps" in out) == advised and all(f"note: {note}" in out for note in notes)
