"""``generate --prompts --engine ray``: the same files as in one process, whatever happens to an actor."""

import os
import sys
import threading
from queue import SimpleQueue

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from dit_accel.errors import BatchError, OutOfMemoryError, UnsupportedError
from dit_accel.models.presets import load_preset
from dit_accel.serving import ray_cluster, ray_engine
from dit_accel.serving.engine import Loaded, Made
from dit_accel.serving.loading import Loading
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.ray_engine import RayEngine
from dit_accel.serving.remote_worker import LoadError
from tests.cli.test_manifest import rows
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_pipeline

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers don't import tests
SMALL = ("--steps", "2", "--height", "64", "--width", "64")
RAY = ("--engine", "ray", "--actors", "2")


@pytest.fixture
def generate(run, tmp_path):
    def invoke(lines, *more):
        (tmp_path / "prompts.txt").write_text("".join(f"{line}\n" for line in lines))
        return run("generate", "--prompts", "prompts.txt", "--output-dir", "out", *SMALL, *more)

    return invoke


class Dying(ray_cluster._WorkerActor):
    """Its process ends when it gets line 2, the first time."""

    def exchange(self, message):
        if isinstance(message, tuple) and message[0][0].index == 1 and not os.path.exists("died"):
            os.close(os.open("died", os.O_CREAT))
            os._exit(1)
        return super().exchange(message)


def test_an_actor_that_dies_costs_nothing_but_what_it_was_at(cluster, generate, tmp_path, monkeypatch):
    """Every line has its file once, equal to that of one process, and a further run has nothing to do."""
    tiny_pipeline("flux").save_pretrained(tmp_path / "flux")
    monkeypatch.setattr(ray_cluster, "_WorkerActor", Dying)
    prompts = [f"picture {number}" for number in range(4)]
    result = generate(prompts, "--model", "flux", *RAY[:3], "1")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "died").exists() and result.output.count("attempt") == 1
    assert "note: line 2, attempt 1 of 3: the process that ran the request died" in result.output
    shared = {row["index"]: row for row in rows(tmp_path / "out")}
    assert len(shared) == 4 and all(row["report"]["steps"] for row in shared.values())
    again = generate(prompts, "--model", "flux")
    assert "4 of 4 done before" in again.output and "wrote" not in again.output
    (tmp_path / "out").rename(tmp_path / "shared")
    assert generate(prompts, "--model", "flux").exit_code == 0
    for row in rows(tmp_path / "out"):
        files = (tmp_path / "shared" / shared[row["index"]]["file"], tmp_path / "out" / row["file"])
        assert equal_up_to_rounding(*(np.asarray(Image.open(file)) for file in files))


class Hands:
    """A worker without a process, which does as a prompt says.

    Args:
        loads: errors of its attempts to load the pipeline; none are left once it has loaded.
    """

    def __init__(self, *loads):
        self.loads, self.calls, self.restarts, self.is_closed = [*loads], [], 0, False

    def wait(self):
        if self.loads:
            raise self.loads.pop(0)
        return Loaded(None, None, ".png", None)

    def restart(self):
        self.restarts += 1
        return self.wait()

    def run(self, jobs, preset, suffix, tell):
        prompts = [job.settings["prompt"] for job in jobs]
        self.calls.append("".join(prompts))
        tell(1, 1)
        for prompt, error in ERRORS.items():
            if prompt in prompts:
                raise error
        return [Made(prompt.encode(), 0.5, None, [job.index for job in jobs]) for prompt in prompts]

    def close(self):
        self.is_closed = True


ERRORS = {
    "die": BatchError("the process died"),
    "refuse": UnsupportedError("not with me"),
    "raise": RuntimeError("CUDA error"),
    "large": OutOfMemoryError("no memory"),
    "lost": LoadError("can't be loaded again"),
}


class Progress:
    def begin(self, what):
        assert what.endswith(" actors at work")


def made(workers, *batches, console=None):
    indices = iter(range(99))
    jobs = [[Job(next(indices), {"prompt": prompt}) for prompt in batch] for batch in batches]
    engine = RayEngine(workers, console or Console(quiet=True))
    try:
        engine.wait_for_one()
        results = {job.index: getattr(end, "reason", end) for job, end in engine.make_all(jobs, Progress())}
    finally:
        engine.close()
    assert all(worker.is_closed for worker in workers)
    return {index: end if isinstance(end, str) else (end.data.decode(), end.batch) for index, end in results.items()}


def test_lines_of_a_batch_share_a_contract():
    """Also where prompts of other batches have their own steps, which a deadline can't have."""
    loaded = Loaded(None, load_preset("balanced", per_prompt=True), ".png", load_preset("balanced"))
    for targets in ({}, {"max_seconds": 9.0}):
        jobs = [Job(index, {"prompt": "a", **targets}) for index in range(2)]
        schedule = ray_engine._Batch(jobs, loaded, SimpleQueue()).preset.schedule
        assert (schedule.per_prompt, schedule.max_seconds) == (not targets, targets.get("max_seconds"))


def test_a_line_that_fails_every_time_is_given_up(capsys):
    """After some attempts, each in a new process, or one refusal; the other lines are made, and notes stand once."""
    worker = Hands()
    ends = made([worker], ["a"], ["die"], ["refuse"], ["raise"], ["large"], ["b"], console=Console())
    reasons = {1: "the process died", 2: "not with me", 3: "RuntimeError: CUDA error", 4: "no memory"}
    assert ends == {0: ("a", [0]), 5: ("b", [5])} | reasons
    assert [worker.calls.count(prompt) for prompt in ("a", "die", "refuse", "raise", "large")] == [1, 3, 1, 3, 3]
    assert worker.restarts == 9
    notes = capsys.readouterr().out
    assert [notes.count(f"note: line {line}, attempt") for line in range(1, 7)] == [0, 3, 0, 3, 3, 0]


def test_lines_of_a_batch_that_fails_are_made_alone(capsys):
    """Each once more, at the end; a worker that has too little memory for the batch alone stays."""
    worker = Hands()
    ends = made([worker], ["a", "refuse"], ["b", "c"], ["d", "large"], console=Console())
    assert {place: ends.pop(place) for place in (1, 5)} == {1: "not with me", 5: "no memory"}
    assert ends == {0: ("a", [0]), 2: ("b", [2, 3]), 3: ("c", [2, 3]), 4: ("d", [4])}
    assert worker.calls[:5] == ["arefuse", "bc", "dlarge", "a", "refuse"] and worker.restarts == 3
    notes = capsys.readouterr().out
    assert "note: lines 1, 2 run one at a time, because one call failed: not with me" in notes


@pytest.mark.parametrize(
    ("loads", "end", "restarts"),
    [
        ([BatchError("died"), RuntimeError("CUDA")], None, 2),
        ([BatchError("died")] * 3, "no actor can load the pipeline: died", 2),
        ([UnsupportedError("no such model")], "^no such model$", 0),
    ],
    ids=["defect", "defects", "refusal"],
)
def test_a_pipeline_is_loaded_so_often_and_no_more(loads, end, restarts):
    """A refused pipeline is always refused; any other error may not repeat."""
    worker = Hands(*loads)
    if end is None:
        assert made([worker], ["a"]) == {0: ("a", [0])}
    else:
        with pytest.raises(UnsupportedError if restarts == 0 else BatchError, match=end):
            made([worker], ["a"])
    assert worker.restarts == restarts


def test_others_go_on_without_an_actor_that_cannot_load(capsys):
    workers = [Hands(UnsupportedError("not here")), Hands(), Hands(UnsupportedError("not here"))]
    assert made(workers, ["a"], ["b"], console=Console()) == {0: ("a", [0]), 1: ("b", [1])}
    assert workers[0].calls == [] and capsys.readouterr().out.count("not here") <= 1


def test_actors_that_are_all_lost_end_the_run():
    """A line is not given up for it, and does not wait for ever."""
    with pytest.raises(BatchError, match="no actor can load the pipeline: can't be loaded again"):
        made([Hands()], ["lost"])


def test_an_actor_has_its_next_line_before_the_files_of_the_last_are_written():
    """So an actor does not wait for the disk."""
    worker, begun = Hands(), threading.Semaphore(0)
    worker.run = lambda jobs, *more: begun.release() or Hands.run(worker, jobs, *more)
    engine = RayEngine([worker], Console(quiet=True))
    engine.wait_for_one()
    jobs, taken = [[Job(index, {"prompt": "a"})] for index in range(3)], 0
    for place, _ in enumerate(engine.make_all(jobs, Progress())):
        while taken < min(place + 2, 3):
            assert begun.acquire(timeout=60)
            taken += 1
    engine.close()


@pytest.mark.parametrize(
    ("place", "asked", "actors", "device", "count"),
    [
        ({"GPU": 4, "CPU": 8}, None, None, "cuda", 3),
        ({"GPU": 2, "CPU": 8}, None, None, "cuda", 2),
        ({"GPU": 4, "CPU": 8}, "cpu", 8, "cpu", 3),
        ({"CPU": 8}, None, 2, "cpu", 2),
    ],
    ids=["more GPUs than lines", "fewer", "not GPUs", "CPUs"],
)
def test_actors_take_the_devices_that_there_are(monkeypatch, place, asked, actors, device, count):
    """Actors number at most the jobs, each with its pipeline's devices; the user's cluster stays up."""
    started = []

    class Actor(Hands):
        def __init__(self, setup, patience, start, attempts):
            super().__init__()
            started.append((setup.loading.device, start.args))

    monkeypatch.setattr(ray_engine, "RemoteWorker", Actor)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: place)
    monkeypatch.setattr(ray, "shutdown", pytest.fail)
    setup = Setup("model", loading=Loading(asked), jobs=[Job(index, {}) for index in range(3)])
    with ray_engine.ray_engine(setup, actors, Console(quiet=True)):
        pass
    assert started == [(device, ({"num_cpus": 1, "num_gpus": int(device == "cuda")},))] * count


def test_an_actor_works_where_the_command_runs(tmp_path, monkeypatch):
    """So paths of models and images mean the same; elsewhere the actor stays where it is."""
    monkeypatch.setattr(ray_cluster, "serve_jobs", lambda link, setup: link.send("loaded"))
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in ("missing", "there"):
        assert ray_cluster._WorkerActor().open(None, str(tmp_path / folder)) == "loaded"
        assert os.getcwd() == str(tmp_path if folder == "missing" else tmp_path / "there")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--engine", "ray"), "--actors: must be given: each actor takes one of the Ray cluster's 2 CPUs"),
        ((*RAY[:3], "3"), "--actors: can't be 3: each actor takes a CPU, and the Ray cluster has 2"),
        ((*RAY, "--device", "cuda"), "--device: is cuda, but the Ray cluster has no GPU"),
    ],
)
def test_what_does_not_go_together_says_so(cluster, generate, options, told):
    result = generate(["a"], *options)
    assert result.exit_code == 2 and told in result.output


def test_a_cluster_that_is_not_there_is_told_at_once(generate, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = generate(["a"], *RAY)
    assert result.exit_code == 2 and "--engine: no Ray cluster at RAY_ADDRESS=127.0.0.1:1: " in result.output


@pytest.mark.parametrize("value, shared", [(None, "0"), ("1", "1")], ids=["unsaid", "allowed"])
def test_a_cluster_that_is_started_here_tells_nobody_of_itself(monkeypatch, value, shared):
    """Ray would report its use to its makers unless the user's own environment has a say."""
    started = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    if value is not None:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", value)
    monkeypatch.setattr(ray, "init", lambda **options: started.append((os.environ["RAY_USAGE_STATS_ENABLED"], options)))
    ray_cluster.connect(Console(quiet=True))
    ((enabled, options),) = started
    assert enabled == shared and options["include_dashboard"] is options["log_to_driver"] is False
