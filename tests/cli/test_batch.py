"""``generate --prompts``: a file a line, a manifest, and nothing made twice or lost where a run was interrupted."""

import json
import os
import signal

import numpy as np
import pytest
from PIL import Image

from dit_accel import load_preset
from dit_accel.cli import batch
from dit_accel.errors import OutOfMemoryError, UnsupportedError
from dit_accel.serving import worker
from dit_accel.serving.media import Pictures
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.tools.measure.timing import Output
from tests.cli.test_manifest import rows
from tests.forked import fork_server, run_command
from tests.tiny import tiny_pipeline

LINES = ("--prompts", "x.txt", "--output-dir", "out")
COUNT = 5  # images
SMALL = ("--steps", "3", "--height", "64", "--width", "64", "--output-dir", "out", "--quiet")


@pytest.fixture
def generate(run, model):
    def invoke(folder, name, lines, *more):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
        return run("generate", "-m", model, "--prompts", name, *SMALL, *more)

    return invoke


def test_every_line_gets_a_file_and_a_line_of_the_manifest(generate, tmp_path):
    """Settings in a line override those of the command."""
    lines = [{"prompt": "a fox"}, {"prompt": "a hen", "seed": 7, "steps": 2}]
    result = generate(tmp_path, "prompts.jsonl", map(json.dumps, lines))
    assert result.exit_code == 0, result.output
    first, second = rows(tmp_path / "out")
    assert [first["prompt"], first["seed"], first["steps"]] == ["a fox", 0, 3]
    assert [second["prompt"], second["seed"], second["steps"]] == ["a hen", 7, 2]
    assert len(second["report"]["steps"]) == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"0000.png", "0001.png", "manifest.jsonl"}
    assert batch._checksum(tmp_path / "out" / "0000.png") == first["sha256"]


def test_lines_have_contracts(generate, tmp_path):
    """Each has its own preset, target and statement; a contract that can't be kept is refused before any run."""
    line, floor = {"prompt": "a fox", "steps": 8}, {"target_psnr": 25.0, "max_seconds": 600.0}
    kinds = {}, {"computed_steps": 4}, {"preset": "none"}, {"preset": "quality"}, floor
    for _ in range(2):
        result = generate(tmp_path, "prompts.jsonl", [json.dumps(line | kind) for kind in kinds])
        assert result.exit_code == 0, result.output
    made = rows(tmp_path / "out")
    kept = [row["contract"] for row in made]
    assert [each["decided_by"] for each in kept] == ["preset", "budget", "preset", "preset", "floor"]
    assert kept[1]["computed_steps"] == 4 and made[2]["report"] is None and made[2]["preset"] is None
    assert made[1]["preset"] == load_preset("balanced", computed_steps=4).effective() != made[0]["preset"]
    assert made[3]["preset"] == load_preset("quality").effective()
    assert kept[4]["deadline_met"] and kept[4]["floor_met"]
    lines = map(json.dumps, (line, line | {"max_seconds": 1e-3}))
    late = generate(tmp_path, "late.jsonl", lines, "--output-dir", "late")
    assert late.exit_code == 2 and "line 2: max_seconds: must be at least" in late.stderr
    for wrong, message in (
        ({"target_psnr": 99.0}, "--prompts: line 2: "),
        ({"computed_steps": 4, "target_error": 0.1}, "both choose the computed steps"),
        ({"preset": "none", "max_seconds": 9}, "max_seconds needs a preset"),
        ({"preset": "turbi"}, "did you mean 'turbo'"),
    ):
        lines = [json.dumps(line), json.dumps(line | wrong)]
        refused = generate(tmp_path, "wrong.jsonl", lines, "--output-dir", "wrong")
        assert refused.exit_code == 2 and message in refused.stderr and "wrote" not in refused.output


def die_in_the_third_call():
    call, calls = worker.timed_call, []

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)

    worker.timed_call = killed


def test_a_killed_run_loses_and_repeats_nothing(generate, model, tmp_path, monkeypatch):
    """After SIGKILL midway and Ctrl-C later, lines of the manifest stay, and the others follow."""
    prompts = [f"picture {number}" for number in range(COUNT)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    command = ("generate", "-m", model, "--prompts", "prompts.txt", *SMALL)
    process = fork_server().Process(target=run_command, args=(tmp_path, command, die_in_the_third_call))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    whole = [row["file"] for row in rows(tmp_path / "out")]
    assert whole == ["0000.png", "0001.png"]
    stamps = {file: (tmp_path / "out" / file).stat().st_mtime_ns for file in whole}
    call, made, stopped = worker.timed_call, [], []

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let commands behind & ignore it

    def interrupted(pipe, arguments, seed):
        if len(made) == 2 and not stopped:
            stopped.append(True)
            signal.raise_signal(signal.SIGINT)
        made.append(arguments["prompt"])
        return call(pipe, arguments, seed)

    monkeypatch.setattr(worker, "timed_call", interrupted)
    assert generate(tmp_path, "prompts.txt", prompts).exit_code == 130
    signal.signal(signal.SIGINT, handler)
    assert generate(tmp_path, "prompts.txt", prompts).exit_code == 0 and made == prompts[len(whole) :]
    assert {file: (tmp_path / "out" / file).stat().st_mtime_ns for file in whole} == stamps
    files = {row["file"] for row in rows(tmp_path / "out")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*files, "manifest.jsonl"} and len(files) == COUNT


@pytest.fixture
def calls(monkeypatch):
    """Prompts of each call of the pipeline; one that contains "bad" raises, and so does a batch with "large"."""
    call, made = worker.timed_call, []

    def watched(pipe, arguments, seed):
        made.append(arguments["prompt"])
        if "bad" in str(made[-1]):
            raise UnsupportedError("no such words")
        if isinstance(made[-1], list) and "large" in made[-1]:
            raise OutOfMemoryError("out of memory")
        return call(pipe, arguments, seed)

    monkeypatch.setattr(worker, "timed_call", watched)
    return made


def test_neighbours_share_a_call_and_get_what_they_get_alone(generate, calls, tmp_path):
    """Images of a shared call equal separate ones up to rounding, with their own steps; other settings run apart."""
    lines = [{"prompt": f"picture {index}", "seed": index, "steps": 8} for index in range(4)]
    lines[2] |= {"steps": 7}
    options = map(json.dumps, lines), "--set", "target_error=0.06"
    assert generate(tmp_path, "prompts.jsonl", *options, "--batch-size", "2").exit_code == 0
    assert calls == [["picture 0", "picture 1"], "picture 2", "picture 3"]
    together = rows(tmp_path / "out")
    assert [row["batch"] for row in together] == [[0, 1], [0, 1], [2], [3]]
    (tmp_path / "out").rename(tmp_path / "together")
    assert generate(tmp_path, "prompts.jsonl", map(json.dumps, lines), *options[1:]).exit_code == 0
    for row, alone in zip(together, rows(tmp_path / "out"), strict=True):
        assert row["preset"] == alone["preset"]
        reports = row["report"], alone["report"]
        assert len({json.dumps([step["mode"] for step in report["steps"]]) for report in reports}) == 1
        assert reports[0]["computed_fraction"] == pytest.approx(reports[1]["computed_fraction"])
        pictures = [Image.open(tmp_path / folder / row["file"]) for folder in ("together", "out")]
        first, second = (np.asarray(picture, dtype=int) for picture in pictures)
        assert abs(first - second).max() <= 1


def test_a_batch_that_is_too_large_is_made_line_by_line(run, calls, model, tmp_path):
    """The note says so."""
    (tmp_path / "prompts.txt").write_text("a\nlarge\nc\n")
    result = run("generate", "-m", model, "--prompts", "prompts.txt", *SMALL[:-1], "--batch-size", "2")
    assert result.exit_code == 0 and "lines 1, 2 run one at a time, because one call failed: out of" in result.output
    assert calls == [["a", "large"], "a", "large", "c"] and len(rows(tmp_path / "out")) == 3


def test_guidance_of_a_line_is_its_own(monkeypatch):
    """A guidance component of the pipeline, which stays between calls, follows each line too."""
    pipe, scales = tiny_pipeline("hunyuan15"), []
    jobs = [Job(0, {"prompt": "a", "seed": 0, "guidance": 3.0}), Job(1, {"prompt": "b", "seed": 0})]
    made = Output([Image.new("RGB", (8, 8))], 0.0, 0.0, 0)
    monkeypatch.setattr(worker, "open_pipeline", lambda *_: (pipe, Pictures(), None))
    monkeypatch.setattr(worker, "timed_call", lambda pipe, *_: scales.append(pipe.guider.guidance_scale) or made)
    engine = worker.Worker(Setup("model", jobs=jobs))
    for job in jobs:
        engine.make([job])
    assert scales == [3.0, 6.0]
