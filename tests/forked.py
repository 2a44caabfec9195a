"""Processes as forks of one that has imported what they need, which is most of the time of their start."""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LONGEST = 180  # seconds of one check of ranks
IMPORTED = (
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.auto_pipeline",
    "dit_accel.cli",
    "dit_accel.serving.http.server",
    "dit_accel.serving.worker",
)


def run_forked(ranks: int, run: Callable[[int], None]) -> int:
    """Run a function in a fork per rank; return 0 if all of them end well."""
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            try:
                run(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        processes.append(process)
    return int(any(os.waitpid(process, 0)[1] for process in processes))


def run_checks(rank: int, ranks: int, checks: Callable[[], dict[str, Callable]], backend: str = "gloo") -> None:
    """Run checks as one of several ranks without gradients, and write their results to ``FOLDER/RANK.json``.

    ``checks`` returns them by name; the command's arguments are the folder and names among them.
    """
    import torch
    import torch.distributed as dist

    folder, timeout, found = Path(sys.argv[1]), timedelta(seconds=LONGEST), {}
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    for name, check in checks().items():
        faulthandler.dump_traceback_later(LONGEST, exit=True)  # a rank that waits for ever would not say where
        try:
            found[name] = check()
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def results_of_ranks(module: str, ranks: int, folder: Path, *checks: str, **environment: str) -> list[dict]:
    """Run a module of checks in a folder, and return the results of each rank, by check."""
    command = [sys.executable, "-m", module, folder, *checks]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    output = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert output.returncode == 0, output.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def on_ranks(found: list[dict], check: str, ranks: int = 2) -> list[dict]:
    """Results of the check's ranks, none of which failed."""
    rows = [rank[check] for rank in found[:ranks]]
    assert not any("failed" in row for row in rows), rows
    return rows


@cache
def fork_server() -> ForkServerContext:
    """Return a context whose processes are forks of one that runs FLUX; all tests of this process share it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def run_command(folder: Path, arguments: Sequence[str], change: Callable[[], None] | None = None) -> None:
    """Run dit-accel in a folder, as the target of a process; it prints to ``output.txt`` and ``errors.txt`` there.

    Args:
        change: called first, to change modules.
    """
    from dit_accel.cli import main
    from dit_accel.serving import remote_worker

    os.chdir(folder)
    for stream, name in ((1, "output.txt"), (2, "errors.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream)
    remote_worker.get_context = lambda _: get_context("fork")
    if change is not None:
        change()
    sys.argv = ["dit-accel", *map(str, arguments)]
    main()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, for a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
