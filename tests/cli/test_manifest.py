"""The manifest of ``generate --prompts``: its state after a crash, and its check of settings."""

import json
import os
from io import BytesIO
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console

from dit_accel.cli import batch
from dit_accel.cli.batch import run_jobs
from dit_accel.errors import ArgumentError, BatchError, UnsupportedError
from dit_accel.presets import load_preset
from dit_accel.serving import worker as working
from dit_accel.serving.engine import Failure, Made
from dit_accel.serving.media import Pictures
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.tools.measure.timing import Output

FACTS = {"model": "some/model", "lora": {"owner/name": 0.5}, "call": {"sigmas": [1.0, 0.5]}}
PRESET = {"name": "balanced", "schedule": {"order": 1}}


class Engine:
    """Makes files of their prompts, and notes the lines that it makes; a prompt "bad" fails."""

    suffix = ".png"

    def __init__(self, preset=PRESET):
        self.loaded, self.lines = SimpleNamespace(values_of=lambda job: preset), []

    def make_all(self, batches, progress):
        for job in (job for each in batches for job in each):
            self.lines.append(job.index)
            prompt = job.settings["prompt"]
            made = Made(prompt.encode(), 0.5, {"steps": [1]}, [job.index])
            yield job, Failure("no such words") if prompt == "bad" else made


@pytest.fixture
def make(tmp_path):
    """Runs lines in a folder, where they are; gives the lines that had to be made."""

    def invoke(*settings, facts=FACTS, preset=PRESET, force=False):
        engine = Engine(preset)
        jobs = [Job(index, {"seed": 0, **each}) for index, each in enumerate(settings)]
        run_jobs(engine, jobs, tmp_path, facts, Console(quiet=True), batch_size=1, force=force)
        return engine.lines

    return invoke


def rows(folder):
    return [json.loads(line) for line in (folder / batch.MANIFEST).read_text().splitlines()]


LINES = {"prompt": "a"}, {"prompt": "b", "steps": 3}, {"prompt": "c"}


def test_a_crash_while_a_line_is_written_costs_that_line_alone(make, tmp_path):
    """After a cut at any place every line parses, complete lines stay, and lines without a row are made again."""
    make(*LINES)
    manifest = tmp_path / batch.MANIFEST
    whole = manifest.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [*range(0, len(whole), 7), *(end - 1 for end in ends), *ends]:
        manifest.write_bytes(whole[:cut])
        kept = sum(end - 1 <= cut for end in ends)  # a line is whole without its newline
        assert make(*LINES) == [*range(kept, 3)] and manifest.read_bytes() == whole
    (tmp_path / "0000.png").write_bytes(b"spoilt")
    (tmp_path / "0002.png").unlink()
    assert make(*LINES) == [0, 2]


def test_what_is_no_row_is_passed_over(make, tmp_path):
    """Lines that are not rows, such as an unwritten disk block or another program's line, are skipped."""
    make(*LINES)
    manifest = tmp_path / batch.MANIFEST
    manifest.write_bytes(b'\xff\x00\n[1]\n5\n"text"\n{"index": []}\n\n' + manifest.read_bytes())
    assert make(*LINES) == []


@pytest.mark.parametrize("fails", ["write_bytes", "replace"])
def test_a_file_has_its_name_when_it_is_whole(make, tmp_path, monkeypatch, fails):
    """If writing fails, the previous file stays, no row is added, and the next run makes the missing file."""
    make({"prompt": "before"})

    def half(path, data):
        with path.open("wb") as file:
            file.write(data[:1])
        raise OSError("disk full")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(*((batch.Path, fails, half) if fails == "write_bytes" else (os, fails, fail)))
    with pytest.raises(OSError, match="disk full"):
        make({"prompt": "after"}, {"prompt": "more"}, force=True)
    assert (tmp_path / "0000.png").read_bytes() == b"before" and not (tmp_path / "0001.png").exists()
    assert [row["prompt"] for row in rows(tmp_path)] == ["before"]
    monkeypatch.undo()
    assert make({"prompt": "before"}, {"prompt": "more"}) == [1]


def test_a_row_is_on_disk_before_the_next_line_is_made(make, tmp_path, monkeypatch):
    """A machine that goes down loses no row of a file that is there."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    make(*LINES)
    ends = [place + 1 for place, byte in enumerate((tmp_path / batch.MANIFEST).read_bytes()) if byte == ord("\n")]
    assert synced == ends


def changed(name, first, second):
    return [pytest.param(name, first, second, id=name), pytest.param(name, second, first, id=f"{name}-back")]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        *changed("prompt", {"lines": {"prompt": "a"}}, {"lines": {"prompt": "b"}}),
        *changed("seed", {}, {"lines": {"prompt": "a", "seed": 1}}),
        *changed("steps", {}, {"lines": {"prompt": "a", "steps": 3}}),
        *changed("negative-prompt", {}, {"lines": {"prompt": "a", "negative-prompt": ""}}),
        *changed("model", {}, {"facts": FACTS | {"model": "other/model"}}),
        *changed("lora", {}, {"facts": {"model": "some/model", "call": FACTS["call"]}}),
        *changed("lora", {}, {"facts": FACTS | {"lora": {"owner/name": 0.6}}}),
        *changed("quantize", {}, {"facts": FACTS | {"quantize": "int8"}}),
        *changed("preset", {}, {"preset": {"name": "balanced", "schedule": {"order": 2}}}),
        *changed("preset", {}, {"preset": None}),
    ],
)
def test_a_setting_that_changes_is_noticed(make, tmp_path, name, first, second):
    """A setting that is added, changed or removed is named, and the line is made again on request."""

    def run(given, **options):
        given = {"lines": {"prompt": "a"}} | given
        return make(given.pop("lines"), **given, **options)

    assert run(first) == [0] and run(first) == []
    before = (tmp_path / "0000.png").read_bytes(), (tmp_path / batch.MANIFEST).read_bytes()
    with pytest.raises(ArgumentError, match=rf"holds line 1 with other settings: {name} \("):
        run(second)
    assert before == ((tmp_path / "0000.png").read_bytes(), (tmp_path / batch.MANIFEST).read_bytes())
    assert run(second, force=True) == [0] and run(second) == []
    assert run(first, force=True) == [0], "the file is that of the latest row"


def test_a_line_that_failed_holds_nothing_against_other_settings(make, tmp_path):
    """A failed line has no file, so it is made with the current settings; lines with a file stay."""
    with pytest.raises(BatchError, match=r"1 of 2 lines failed \(2\)"):
        make({"prompt": "a"}, {"prompt": "bad"})
    assert make({"prompt": "a"}, {"prompt": "b", "steps": 5}) == [1]
    assert [row.get("error") for row in rows(tmp_path)] == [None, "no such words", None]


def test_lines_that_are_not_asked_for_stay(make, tmp_path):
    """A shorter file of prompts checks only its own lines, and a longer one makes only the new lines."""
    make(*LINES)
    assert make(LINES[0]) == [] and make(*LINES, {"prompt": "d"}) == [3]
    assert [row["index"] for row in rows(tmp_path)] == [0, 1, 2, 3]


def test_one_process_of_several_writes(make, tmp_path, monkeypatch):
    """The others make the lines with it, and touch no file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert make(*LINES) == [0, 1, 2] and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    assert make(*LINES) == [0, 1, 2] and len(rows(tmp_path)) == 3


@pytest.mark.parametrize(
    ("settings", "size", "apart"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"per_prompt": False}, 2, False),
        ({"schedule": {"control": "interval", "interval": 2}}, 2, False),
    ],
    ids=["single lines", "batch", "off", "interval"],
)
def test_prompts_of_a_batch_are_decided_apart_unless_it_is_said_otherwise(monkeypatch, settings, size, apart):
    """Values set by the preset stay, and so does a preset without a closed loop."""
    preset, started = load_preset("balanced", **settings), []
    pipe = SimpleNamespace()
    monkeypatch.setattr(
        working, "open_pipeline", lambda *_: (pipe, SimpleNamespace(default_output=batch.Path("a.png")), preset)
    )
    monkeypatch.setattr(working, "start_pipeline", lambda _, preset, __: started.append(preset))
    assert working.Worker(Setup("some/model", batch_size=size)).preset == preset.effective()
    assert started[0].schedule.per_prompt == apart


def test_each_line_of_a_batch_has_its_own_file_and_report(monkeypatch):
    """Seconds are those of the shared call, sounds its own, and a plain run has no report."""
    pictures = [Image.new("RGB", (2, 2), (level,) * 3) for level in (0, 99)]
    report = SimpleNamespace(of_prompt=lambda place: SimpleNamespace(to_json=lambda: {"prompt": place}))
    pipe, seeds = SimpleNamespace(dit_accel=SimpleNamespace(report=lambda: report)), []
    monkeypatch.setattr(working, "open_pipeline", lambda *_: (pipe, Sounding(), load_preset("balanced")))
    monkeypatch.setattr(working, "start_pipeline", lambda *_: None)
    monkeypatch.setattr(working, "call_arguments", lambda _, __, options, others: options | others)
    arguments, sounds = [], []

    class Sounding(Pictures):
        def write(self, picture, path, sound=None):
            sounds.append(sound)
            return super().write(picture, path)

    def call(pipe, given, seed):
        arguments.append(given), seeds.append(seed)
        count = len(seed) if isinstance(seed, list) else 1
        return Output(pictures[:count], 9.0, 5.0, 1, sounds=["first", "second"][:count])

    monkeypatch.setattr(working, "timed_call", call)
    setup = Setup("some/model", batch_size=2, call={"sigmas": [1.0]}, fps=9.0, image="picture")
    jobs = [Job(3, {"prompt": "a", "negative-prompt": "x", "seed": 7, "steps": 2}), Job(4, {"prompt": "b", "seed": 8})]
    jobs[1].settings.update({"negative-prompt": "y", "steps": 2})
    worker = working.Worker(setup)
    made = worker.make(jobs)
    assert [Image.open(BytesIO(each.data)).getpixel((0, 0))[0] for each in made] == [0, 99]
    assert [each.report for each in made] == [{"prompt": 0}, {"prompt": 1}]
    assert [(each.seconds, each.batch) for each in made] == [(5.0, [3, 4])] * 2
    assert sounds == ["first", "second"]
    worker.preset = None
    assert [each.report for each in worker.make(jobs[:1])] == [None]
    common = {"image": "picture", "steps": 2, "sigmas": [1.0], "fps": 9.0}
    several, one = {"prompt": ["a", "b"], "negative-prompt": ["x", "y"]}, {"prompt": "a", "negative-prompt": "x"}
    assert arguments == [common | several, common | one]
    assert seeds == [[7, 8], 7]
    monkeypatch.setattr(working, "timed_call", lambda *_: Output(pictures[:1], 9.0, 5.0, 1))
    with pytest.raises(UnsupportedError, match="SimpleNamespace made 1 of 2 prompts"):
        worker.make(jobs)


def test_every_line_is_looked_at_before_any_is_made(monkeypatch):
    """An error in the last line is reported before the first line runs for hours."""
    pipe, looked = SimpleNamespace(), []
    monkeypatch.setattr(working, "open_pipeline", lambda *_: (pipe, Pictures(), None))
    monkeypatch.setattr(working, "start_pipeline", lambda *_: looked.append("started"))
    monkeypatch.setattr(working, "call_arguments", lambda _, __, options, ___: looked.append(options["prompt"]))
    working.Worker(Setup("some/model", jobs=[Job(index, {"prompt": index}) for index in range(3)]))
    assert looked == [0, 1, 2, "started"]


def test_the_first_error_of_a_batch_ends_the_run_and_several_processes_at_once(monkeypatch):
    """A single process makes the other lines first; one of several processes exits, because the others may hang."""
    worker = object.__new__(working.Worker)
    worker.pipe, worker._console, worker.suffix = SimpleNamespace(), Console(quiet=True), ".png"
    worker._has_contracts = False

    def make(batch):
        if len(batch) > 1 or batch[0].index != 1:
            raise UnsupportedError(f"line {batch[0].index}")
        return ["made"]

    monkeypatch.setattr(worker, "make", make)
    jobs, progress = [Job(index, {}) for index in range(3)], SimpleNamespace(watch=id, begin=lambda *_: None)
    for processes, expected in (("1", [(jobs[1], "made")]), ("2", [])):
        monkeypatch.setenv("WORLD_SIZE", processes)
        made = []
        with pytest.raises(UnsupportedError, match="line 0"):
            made.extend(worker.make_all([jobs], progress))
        assert made == expected
