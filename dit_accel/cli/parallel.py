"""``--parallel``: one command run by several processes, as torchrun starts them, one device each.

All of them make the same picture together; the first writes it, and whichever fails first tells why and ends all.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from math import prod
from typing import NoReturn

from dit_accel.errors import OptionError, shown
from dit_accel.serving.processes import leads, ranks

WAYS = ("ulysses", "branches")  # keywords of parallelize_pipeline


def parse_degrees(text: str | None, used: dict[str, bool]) -> dict[str, int]:
    """``"ulysses=2,branches=2"`` as keywords of ``parallelize_pipeline``; none where a process is alone.

    Args:
        used: options that several processes can't serve, and whether each was given.
    """
    if text is None:
        if ranks() > 1:
            raise OptionError("--parallel", f"torchrun started {ranks()} processes: say how, e.g. ulysses={ranks()}")
        return {}
    degrees = {}
    for part in text.split(","):
        way, _, count = part.partition("=")
        if way.strip() not in WAYS or not count.strip().isdecimal() or int(count) < 1:
            raise OptionError("--parallel", f"must be ulysses=COUNT, branches=COUNT or both, got {shown(text)}")
        degrees[way.strip()] = int(count)
    needed = prod(degrees.values())
    if needed != ranks() or needed == 1:
        raise OptionError(
            "--parallel",
            f"{text} needs {max(needed, 2)} processes, and there {'is 1' if ranks() == 1 else f'are {ranks()}'}: "
            f"torchrun --nproc-per-node {max(needed, 2)} -m dit_accel generate --parallel {text} …",
        )
    for option in (option for option, given in used.items() if given):
        raise OptionError(option, f"can't be used with --parallel {text}")
    return degrees


def tells() -> bool:
    """Whether this process is to tell of its failure: the first of all that fail, for most fail alike."""
    if ranks() == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return leads()
    from torch.distributed import TCPStore

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
        return store.add("dit_accel_failures", 1) == 1
    except RuntimeError:
        return leads()


def run_to_end(app: Callable[[], None]) -> NoReturn:
    """Runs a command line to its end; one process of several leaves at once where it fails, without a last word to
    the others, so that torchrun ends them.
    """
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
        _part()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _part() -> None:
    """Waits for the others, whose devices may still read from this one's."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
