"""Processes as forks of one that has imported what they need, which is most of the time of their start."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

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
