"""Ranks as forks of a process that has imported what they need."""

import os
import traceback
from collections.abc import Callable


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
