"""``--parallel``: one command run by several processes, as torchrun starts them, one device each.

All processes generate one output together, which the first one writes. The first that fails says why and ends all.
"""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from math import prod
from typing import NoReturn

from dit_accel.errors import ArgumentError, shown
from dit_accel.serving.processes import leads, ranks

WAYS = ("ulysses", "branches")  # keywords of parallelize_pipeline


def parse_degrees(text: str | None, used: dict[str, bool]) -> dict[str, int]:
    """Parse ``"ulysses=2,branches=2"`` into keywords of ``parallelize_pipeline``, which exclude options in use."""
    if text is None:
        if (count := ranks()) > 1:
            rule = f"must be given: torchrun started {count} processes, e.g. --parallel ulysses={count}"
            raise ArgumentError("parallel", rule)
        return {}
    degrees = {}
    for part in text.split(","):
        way, _, count = part.partition("=")
        if way.strip() not in WAYS or not count.strip().isdecimal() or int(count) < 1:
            raise ArgumentError("parallel", f"must be ulysses=COUNT, branches=COUNT or both, got {shown(text)}")
        degrees[way.strip()] = int(count)
    needed = prod(degrees.values())
    if needed != ranks() or needed == 1:
        least, there = max(needed, 2), "is 1" if ranks() == 1 else f"are {ranks()}"
        fix = f"torchrun --nproc-per-node {least} -m dit_accel generate --parallel {text} …"
        raise ArgumentError("parallel", f"{text} needs {least} processes, but there {there}: {fix}")
    for field in (field for field, is_used in used.items() if is_used):
        raise ArgumentError(field, f"can't be used with --parallel {text}")
    return degrees


def tells() -> bool:
    """Return True if this process prints its error: only the first that fails, since most fail with the same error."""
    if ranks() == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return leads()
    from torch.distributed import TCPStore

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5)).add("dit_accel_failures", 1) == 1
    except RuntimeError:
        return leads()


def run_to_end(app: Callable[[], None]) -> NoReturn:
    """Run a command line. One of several processes that fails exits at once, so that torchrun ends the others."""
    if ranks() == 1:
        sys.exit(app())
    code: object = 1
    try:
        app()
    except SystemExit as left:
        code = left.code
    except BaseException:
        if tells():
            traceback.print_exc()
    code = code if isinstance(code, int) else int(code is not None)
    if code == 0:
        import torch.distributed as dist

        if dist.is_initialized():  # other processes' devices may still read from this one
            dist.barrier()
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
