"""``generate --parallel``: settings for a number of processes, and the end of all after one failure."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dit_accel
from dit_accel.cli import parallel
from dit_accel.cli.parallel import parse_degrees, run_to_end
from dit_accel.errors import ArgumentError
from dit_accel.serving import pipelines
from dit_accel.serving.processes import join

REPOSITORY = Path(__file__).parents[2]
FAILING = """
import os
import torch.distributed as dist
from dit_accel.cli import _reported
from dit_accel.cli.parallel import run_to_end
from dit_accel.errors import UnsupportedError
from dit_accel.serving.processes import join

def app():
    with _reported():
        join({"ulysses": 3}, "cpu")
        if os.environ["RANK"] != "0":
            raise UnsupportedError("this one can't go on")
        dist.barrier()

run_to_end(app)
"""


@pytest.fixture
def processes(monkeypatch):
    return lambda count: monkeypatch.setenv("WORLD_SIZE", str(count))


@pytest.mark.parametrize(
    ("count", "text", "degrees"),
    [(1, None, {}), (2, "ulysses=2", {"ulysses": 2}), (4, "ulysses=2, branches=2", {"ulysses": 2, "branches": 2})],
    ids=["alone", "tokens", "both"],
)
def test_degrees_that_fit(processes, count, text, degrees):
    processes(count)
    assert parse_degrees(text, {"--compare": False}) == degrees


@pytest.mark.parametrize(
    ("count", "text", "told"),
    [
        (1, "ulysses=2", "needs 2 processes, but there is 1: torchrun --nproc-per-node 2"),
        (2, "ulysses=2,branches=2", "needs 4 processes, but there are 2"),
        (1, "ulysses=1", "needs 2 processes, but there is 1"),
        (2, "tokens=2", "must be ulysses=COUNT, branches=COUNT or both, got 'tokens=2'"),
        (2, "ulysses", "must be ulysses=COUNT"),
        (2, "ulysses=0", "must be ulysses=COUNT"),
        (2, "ulysses=-2", "must be ulysses=COUNT"),
        (2, "ulysses=two", "must be ulysses=COUNT"),
        (2, None, "torchrun started 2 processes, e.g. --parallel ulysses=2"),
    ],
)
def test_degrees_that_do_not_fit_say_what_would(processes, count, text, told):
    processes(count)
    with pytest.raises(ArgumentError, match=r"^parallel: ") as error:
        parse_degrees(text, {})
    assert told in str(error.value)


@pytest.mark.parametrize("option", [("--compare",), ("--offload", "model")], ids=" ".join)
def test_generate_refuses_what_several_processes_cannot_serve(run, processes, option):
    """Before a model is looked for."""
    processes(2)
    result = run("generate", "-p", "a", "-m", "nowhere/at-all", "--parallel", "ulysses=2", *option)
    assert result.exit_code == 2 and f"{option[0]}: can't be used with --parallel ulysses=2" in result.stderr


def test_branches_are_shared_by_an_accelerated_run(run, processes):
    """A plain run calls the transformer with both branches, or with one after the other, and waits for no process."""
    processes(2)
    common = ("generate", "-p", "a", "-m", "nowhere/at-all", "--preset", "none", "--parallel")
    assert "--parallel: branches need an accelerated run" in run(*common, "branches=2").stderr
    assert "accelerated run" not in run(*common, "ulysses=2", "--device", "nowhere").stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_the_pipeline_is_shared_as_asked(handed_on, processes, monkeypatch, rank):
    """Each process has its own device; only the first one writes and prints."""
    shared = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(pipelines, "join", lambda degrees, device: f"cuda:{rank}")
    monkeypatch.setattr(dit_accel, "parallelize_pipeline", lambda pipe, **degrees: shared.append(degrees))
    processes(2)
    options = ("--parallel", "ulysses=2", "-o", "o.png", "--json", "o.json", "--plot", "p.png", "--image", "black.png")
    seen = handed_on("generate", "-p", "a", "-m", "some/pictures", *options)
    assert shared == [{"ulysses": 2}] and seen["device"] == f"cuda:{rank}" and seen["preset"] == "balanced"
    assert seen["files"] == ({"o.png", "o.json", "p.png"} if rank == 0 else set()) and seen["prints"] == (rank == 0)


@pytest.mark.parametrize(
    ("gpus", "asked", "rank", "device", "backend"),
    [
        (2, None, 1, "cuda:1", "nccl"),
        (2, "cuda", 0, "cuda:0", "nccl"),
        (2, "cpu", 1, "cpu", "gloo"),
        (0, None, 1, "cpu", "gloo"),
        (2, "cuda", 2, "parallel: needs a GPU for each of 4 processes, but there are 2", None),
        (2, "cuda:1", 0, "device: must be cuda or cpu with --parallel, which assigns GPUs itself, got cuda:1", None),
        (2, "mps", 0, "device: must be cuda or cpu", None),
    ],
    ids=["GPUs", "cuda", "cpu", "no GPU", "too few", "one GPU", "mps"],
)
def test_each_process_has_a_device_of_its_own(processes, monkeypatch, gpus, asked, rank, device, backend):
    """The device index is the process's local rank, not its global rank."""
    joined, current = [], []
    processes(4)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("RANK", str(rank + 2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "init_process_group", lambda name, timeout: joined.append(name))
    if backend is None:
        with pytest.raises(ArgumentError, match=f"^{device}"):
            join({"ulysses": 4}, asked)
        return
    assert join({"ulysses": 4}, asked) == device and joined == [backend]
    assert current == ([rank] if device.startswith("cuda") else [])
    assert join({}, "cuda:7") == "cuda:7" and joined == [backend], "a process that is alone joins nobody"


@pytest.mark.parametrize(
    ("store", "told"),
    [("torchrun's", [True, False, False]), ("gone", [False, True, False]), (None, [False, True, False])],
    ids=["counted", "gone", "none"],
)
def test_the_first_process_that_fails_tells_why(processes, monkeypatch, store, told):
    """torchrun's store counts the processes; without a store the first rank reports, whichever rank failed."""
    count = itertools.count(1)

    class Store:
        def __init__(self, host, port, is_master, timeout):
            if store == "gone":
                raise RuntimeError("no store")
            assert (host, port, is_master) == ("here", 7, False)

        def add(self, name, number):
            return next(count)

    processes(3)
    monkeypatch.setattr(dist, "TCPStore", Store)
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "7")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(store is not None))
    tell = []
    for rank in (1, 0, 2):
        monkeypatch.setenv("RANK", str(rank))
        tell.append(parallel.tells())
    assert tell == told
    processes(1)
    assert parallel.tells()


class Left(BaseException):
    """Replaces the end of the process."""


@pytest.mark.parametrize(
    ("end", "code", "parts"),
    [
        (None, 0, True),
        (SystemExit(), 0, True),
        (SystemExit(0), 0, True),
        (SystemExit(2), 2, False),
        (SystemExit("no such file"), 1, False),
        (RuntimeError("a defect"), 1, False),
        (KeyboardInterrupt(), 1, False),
    ],
    ids=["returns", "exits", "0", "2", "text", "defect", "Ctrl-C"],
)
def test_one_process_of_several_leaves_with_its_code(processes, monkeypatch, capsys, end, code, parts):
    """It waits for the others after a success, and exits at once after an error, so that torchrun ends them."""
    codes, parted = [], []

    def app():
        if end is not None:
            raise end
        raise SystemExit(0)

    def leave(code):
        codes.append(code)
        raise Left

    processes(2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(parallel.os, "_exit", leave)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: parted.append(True))
    with pytest.raises(Left):
        run_to_end(app)
    assert codes == [code] and bool(parted) == parts
    assert ("a defect" in capsys.readouterr().err) == isinstance(end, RuntimeError)


def test_a_failure_is_told_once_and_ends_all_processes(tmp_path):
    """Two of three processes fail with the same error, and the third ends while it waits for them."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", script]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0 and ended.stderr.count("error: this one can't go on") == 1
