"""``generate --prompts --engine ray``: the same files as in one process, whatever happens to an actor."""

import io
import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from dit_accel.errors import ArgumentError, BatchError, DitAccelError, OutOfMemoryError, UnsupportedError
from dit_accel.serving import ray_engine
from dit_accel.serving.engine import Made
from dit_accel.serving.loading import Loading
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_pipeline

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers don't import tests
SMALL = ("--steps", "2", "--height", "64", "--width", "64")
RAY = ("--engine", "ray", "--actors", "2")


@pytest.fixture
def generate(run, tmp_path):
    """Runs ``generate`` with prompts from a file of these lines."""

    def invoke(lines, *more):
        (tmp_path / "prompts.txt").write_text("".join(f"{line}\n" for line in lines))
        return run("generate", "--prompts", "prompts.txt", "--output-dir", "out", *SMALL, *more)

    return invoke


def manifest(folder):
    rows = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    return {row["index"]: row for row in rows}, len(rows)


class Dying(ray_engine._Actor):
    """Its process ends in the middle of line 4, the first time."""

    def make(self, batch):
        if batch[0].index == 3 and not os.path.exists("died"):
            os.close(os.open("died", os.O_CREAT))
            os._exit(1)
        return super().make(batch)


class Simple:
    """Makes a file of the prompt's letters, and dies, refuses or raises where the prompt says so."""

    def open(self, what, folder):
        setup, *_ = what
        if setup.model == "missing":
            raise UnsupportedError("no such model")
        if setup.model == "broken":
            os._exit(1)
        return ".png", None

    def make(self, batch):
        prompts = [job.settings["prompt"] for job in batch]
        if "die" in prompts:
            os._exit(1)
        if "refuse" in prompts:
            raise UnsupportedError("not with me")
        if "raise" in prompts:
            raise RuntimeError("CUDA error")
        indices = [job.index for job in batch]
        return [Made(prompt.encode(), 0.5, None, indices) for prompt in prompts]


class Large(Simple):
    """Makes a file of its process's number; runs out of memory at "large" and in batches of it."""

    def make(self, batch):
        if any(job.settings["prompt"] == "large" for job in batch):
            raise OutOfMemoryError(f"no memory in {os.getpid()}")
        return [Made(str(os.getpid()).encode(), 0.5, None, []) for _ in batch]


class Willing(Simple):
    """Makes a file of any prompt."""

    def make(self, batch):
        return [Made(job.settings["prompt"].encode(), 0.5, None, []) for job in batch]


@pytest.fixture
def simple(monkeypatch):
    monkeypatch.setattr(ray_engine, "_Actor", Simple)
    monkeypatch.setattr(ray_engine, "ATTEMPTS", 2)


def test_an_actor_that_dies_costs_nothing_but_what_it_was_at(cluster, generate, tmp_path, monkeypatch):
    """Every line has its file once, equal to that of one process, and a further run has nothing to do."""
    tiny_pipeline("flux").save_pretrained(tmp_path / "flux")
    monkeypatch.setattr(ray_engine, "_Actor", Dying)
    prompts = [f"picture {number}" for number in range(8)]
    result = generate(prompts, "--model", "flux", *RAY)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "died").exists() and result.output.count("note: line 4, attempt 1 of 3") == 1
    assert result.output.count("attempt") == 1 and "made 8 in" in result.output
    rows, lines = manifest(tmp_path / "out")
    assert lines == 8 and all(row["report"]["steps"] for row in rows.values())
    again = generate(prompts, "--model", "flux")
    assert "8 of 8 done before" in again.output and "wrote" not in again.output
    (tmp_path / "out").rename(tmp_path / "shared")
    assert generate(prompts, "--model", "flux").exit_code == 0
    alone, _ = manifest(tmp_path / "out")
    for index in range(8):
        images = [
            np.asarray(Image.open(tmp_path / folder / each[index]["file"]))
            for folder, each in (("shared", rows), ("out", alone))
        ]
        assert equal_up_to_rounding(*images)


def test_a_line_that_fails_every_time_is_given_up(cluster, generate, simple, tmp_path, monkeypatch):
    """A line is given up after some attempts, or one refusal; the rest is made, and the next run tries it again."""
    prompts = ["a", "die", "refuse", "raise", "b", "c"]
    result = generate(prompts, *RAY)
    assert result.exit_code == 1
    assert "error: 3 of 6 lines failed (2, 3, 4); out/manifest.jsonl holds the reasons" in result.output
    assert [result.output.count(f"note: line {line}, attempt") for line in range(1, 7)] == [0, 2, 0, 2, 0, 0]
    rows, lines = manifest(tmp_path / "out")
    assert lines == 6 and {index for index, row in rows.items() if "error" in row} == {1, 2, 3}
    assert rows[1]["error"].startswith("ActorDiedError: ") and "\n" not in rows[1]["error"]
    assert rows[2]["error"] == "not with me" and rows[3]["error"] == "RuntimeError: CUDA error"
    assert {path.read_text() for path in (tmp_path / "out").glob("*.png")} == {"a", "b", "c"}
    monkeypatch.setattr(ray_engine, "_Actor", Willing)
    again = generate(prompts, *RAY)
    assert again.exit_code == 0 and "3 of 6 done before" in again.output
    assert {path.read_text() for path in (tmp_path / "out").glob("*.png")} == set(prompts)


def test_lines_of_a_batch_that_fails_are_made_alone(cluster, generate, simple, tmp_path):
    """The others are made whatever error one of them causes, and so are all batches without it."""
    result = generate(["a", "die", "b", "refuse", "c", "d"], *RAY, "--batch-size", "2")
    assert result.exit_code == 1 and "error: 2 of 6 lines failed (2, 4)" in result.output
    assert "note: lines 3, 4 run one at a time, because one call failed: not with me" in result.output
    assert result.output.count("note: lines 1, 2 run one at a time") == 1
    rows, lines = manifest(tmp_path / "out")
    assert lines == 6 and {index: row["batch"] for index, row in rows.items() if "batch" in row} == {
        **{index: [index] for index in (0, 2)},
        **{index: [4, 5] for index in (4, 5)},
    }


@pytest.mark.parametrize("size", [1, 2], ids=["lines", "batches"])
def test_an_actor_whose_memory_does_not_suffice_for_one_line_is_replaced(
    cluster, generate, tmp_path, monkeypatch, size
):
    """Its memory may stay full; if only the batch was too large, the same actor makes its lines."""
    monkeypatch.setattr(ray_engine, "_Actor", Large)
    monkeypatch.setattr(ray_engine, "ATTEMPTS", 1)
    lines = ["large", "b"] if size == 1 else ["a", "large", "b", "c"]  # of which the first two share a call
    result = generate(lines, "--engine", "ray", "--actors", "1", "--batch-size", size)
    assert result.exit_code == 1 and "error: 1 of" in result.output
    full = {*re.findall(r"no memory in (\d+)", result.output)}
    made = [path.read_text() for path in sorted((tmp_path / "out").glob("*.png"))]
    assert len(made) == len(lines) - 1 and len({*made}) == len(full) == 1
    assert ({*made} == full) == (size == 2)


def test_errors_that_come_of_every_attempt_are_tried_once():
    """Invalid requests always fail; memory and device errors may not repeat."""
    refused = [UnsupportedError("no"), ArgumentError("steps", "no")]
    assert all(map(ray_engine._refuses, refused))
    assert not any(map(ray_engine._refuses, [OutOfMemoryError("full"), RuntimeError("CUDA"), ValueError("no")]))


@pytest.mark.parametrize(
    ("place", "asked", "device", "needs", "count"),
    [
        ({"GPU": 4, "CPU": 8}, None, "cuda", {"num_cpus": 1, "num_gpus": 1}, 3),
        ({"GPU": 2, "CPU": 8}, None, "cuda", {"num_cpus": 1, "num_gpus": 1}, 2),
        ({"CPU": 8}, 2, "cpu", {"num_cpus": 1, "num_gpus": 0}, 2),
    ],
    ids=["more GPUs than lines", "fewer", "CPUs"],
)
def test_actors_take_the_devices_that_there_are(monkeypatch, place, asked, device, needs, count):
    """Actors number at most the jobs, each with its pipeline's devices; the user's cluster stays up."""
    made = []

    class Engine:
        def __init__(self, *what):
            made.append(what)

        wait_for_one = close = lambda self: made.append("called")

    monkeypatch.setattr(ray_engine, "RayEngine", Engine)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: place)
    monkeypatch.setattr(ray, "shutdown", lambda: made.append("shut down"))
    setup = Setup("model", None, {}, None, Loading(), {}, {}, 1)
    with ray_engine.ray_engine(setup, None, [Job(index, {}) for index in range(3)], asked, Console(quiet=True)):
        pass
    (what, *after) = made
    assert what[0].loading.device == device and what[3:5] == (count, needs) and after == ["called", "called"]


@pytest.mark.parametrize(
    ("error", "loads"),
    [(RuntimeError("CUDA error"), 3), (UnsupportedError("no such model"), 1)],
    ids=["defect", "refusal"],
)
def test_a_pipeline_is_loaded_so_often_and_no_more(monkeypatch, error, loads):
    """A refused pipeline is always refused; any other error may not repeat."""
    engine = object.__new__(ray_engine.RayEngine)
    engine._opening, engine._busy, engine._idle, engine._console, engine._told = {}, {}, [], Console(quiet=True), set()
    opened, killed = [], []
    remote = SimpleNamespace(remote=lambda *_: opened.append("load") or len(opened))
    engine._actor, engine._opens = SimpleNamespace(remote=lambda: SimpleNamespace(open=remote)), ()
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray_engine.RayEngine, "_next", lambda self: next(iter(self._opening)))
    monkeypatch.setattr(ray_engine.RayEngine, "_result", lambda self, done: error)
    engine._open()
    with pytest.raises(UnsupportedError if loads == 1 else BatchError):
        engine.wait_for_one()
    assert len(opened) == len(killed) == loads


def test_an_actor_has_its_next_line_before_the_files_of_the_last_are_written(monkeypatch):
    """So an actor does not wait for the disk; messages that all actors share are shown once."""
    engine = object.__new__(ray_engine.RayEngine)
    told, handed = io.StringIO(), []
    actor = SimpleNamespace(make=SimpleNamespace(remote=lambda batch: handed.append(batch) or len(handed)))
    engine._opening, engine._busy, engine._idle, engine._told = {}, {}, [actor], set()
    engine._console = Console(file=told)
    monkeypatch.setattr(ray_engine.RayEngine, "_next", lambda self: next(iter(self._busy)))
    monkeypatch.setattr(ray_engine.RayEngine, "_result", lambda self, done: ["made"])
    batches = [[Job(index, {})] for index in range(3)]
    before = [len(handed) for _ in engine.make_all(batches, SimpleNamespace(begin=lambda *_: None))]
    assert before == [2, 3, 3] and handed == batches
    for note in ("no model", "no model", "no memory"):
        engine._note(note)
    assert told.getvalue().splitlines() == ["note: no model", "note: no memory"]


def test_an_actor_works_where_the_command_runs(tmp_path, monkeypatch):
    """So paths of models and images mean the same; elsewhere the actor stays where it is."""
    monkeypatch.setattr(ray_engine, "Worker", lambda *what: type("Worker", (), {"suffix": ".png", "preset": None}))
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in ("missing", "there"):
        assert ray_engine._Actor().open((None, None, []), str(tmp_path / folder)) == (".png", None)
        assert os.getcwd() == str(tmp_path if folder == "missing" else tmp_path / "there")


@pytest.mark.parametrize(
    ("model", "code", "told"),
    [
        ("missing", 2, "error: no such model"),
        ("broken", 1, "error: no actor can load the pipeline"),
    ],
)
def test_a_pipeline_that_nobody_can_load_ends_the_run(cluster, generate, simple, model, code, told):
    result = generate(["a", "b"], "--model", model, *RAY)
    assert result.exit_code == code and told in result.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--engine", "ray"), "--actors: must be given: each actor takes one of the Ray cluster's 2 CPUs"),
        (
            ("--engine", "ray", "--actors", "3"),
            "--actors: can't be 3: each actor takes a CPU, and the Ray cluster has 2",
        ),
        ((*RAY, "--device", "cuda"), "--device: is cuda, but the Ray cluster has no GPU"),
        ((*RAY, "--device", "cuda:1"), "--device: must be cuda or cpu with --engine ray"),
        ((*RAY, "--parallel", "ulysses=2"), "--parallel: can't be used with --engine ray"),
        (("--actors", "2"), "--actors: needs --engine ray"),
    ],
)
def test_what_does_not_go_together_says_so(cluster, generate, options, told):
    result = generate(["a"], *options)
    assert result.exit_code == 2 and told in result.output


def test_one_prompt_is_no_work_for_ray(run):
    result = run("generate", "--prompt", "a", "--engine", "ray")
    assert result.exit_code == 2 and "--engine: ray needs --prompts" in result.output


def test_a_cluster_that_is_not_there_is_told_at_once(generate, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = generate(["a"], *RAY)
    assert result.exit_code == 2 and "--engine: no Ray cluster at RAY_ADDRESS=127.0.0.1:1: " in result.output


def test_without_ray_its_extra_is_named(generate, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = generate(["a"], *RAY)
    assert result.exit_code == 2
    assert "--engine ray needs ray, which is not installed: pip install 'dit-accel[ray]'" in result.output


def test_what_an_actor_raises_arrives_whole():
    """Errors of the command line keep their content between processes."""
    error = ray.cloudpickle.loads(ray.cloudpickle.dumps(ArgumentError("model", "is not there")))
    assert isinstance(error, DitAccelError) and str(error) == "model: is not there"
