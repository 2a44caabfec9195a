"""``generate --parallel``: what fits the processes there are, and how a failure of one ends all."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dit_accel.cli.options import OptionError
from dit_accel.cli.parallel import parse_degrees

REPOSITORY = Path(__file__).parents[2]
FAILING = """
import os, sys
import torch.distributed as dist
from dit_accel.cli import _told
from dit_accel.cli.parallel import join, run_to_end
from dit_accel.errors import UnsupportedError

def app():
    with _told():
        if sys.argv[1] == "all":
            raise UnsupportedError("none can go on")
        join({"ulysses": 2}, "cpu")
        if os.environ["RANK"] == "1":
            raise UnsupportedError("this one can't go on")
        dist.barrier()

run_to_end(app)
"""


@pytest.fixture
def processes(monkeypatch):
    """Says how many torchrun has started."""
    return lambda count: monkeypatch.setenv("WORLD_SIZE", str(count))


@pytest.mark.parametrize(
    ("count", "text", "degrees"),
    [
        (1, None, {}),
        (2, "ulysses=2", {"ulysses": 2}),
        (4, "ulysses=2, branches=2", {"ulysses": 2, "branches": 2}),
    ],
    ids=["alone", "tokens", "both"],
)
def test_degrees_that_fit(processes, count, text, degrees):
    processes(count)
    assert parse_degrees(text, {"--compare": False}) == degrees


@pytest.mark.parametrize(
    ("count", "text", "told"),
    [
        (1, "ulysses=2", "needs 2 processes, and there is 1: torchrun --nproc-per-node 2"),
        (2, "ulysses=2,branches=2", "needs 4 processes, and there are 2"),
        (1, "ulysses=1", "needs 2 processes, and there is 1"),
        (2, "tokens=2", "must be ulysses=COUNT, branches=COUNT or both, got 'tokens=2'"),
        (2, "ulysses", "must be ulysses=COUNT"),
        (2, None, "torchrun started 2 processes: say how, e.g. ulysses=2"),
    ],
)
def test_degrees_that_do_not_fit_say_what_would(processes, count, text, told):
    processes(count)
    with pytest.raises(OptionError, match=r"^--parallel: ") as error:
        parse_degrees(text, {})
    assert told in str(error.value)


def test_what_several_processes_cannot_serve_is_refused(processes):
    processes(2)
    with pytest.raises(OptionError, match="--compare: can't be used with --parallel ulysses=2"):
        parse_degrees("ulysses=2", {"--offload": False, "--compare": True})


@pytest.mark.parametrize(("who", "told"), [("all", "none can go on"), ("one", "this one can't go on")])
def test_a_failure_is_told_once_and_ends_all_processes(tmp_path, who, told):
    """Also where the others wait for the one that failed."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, who]
    started = time.monotonic()
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0 and time.monotonic() - started < 60
    assert ended.stderr.count(f"error: {told}") == 1
