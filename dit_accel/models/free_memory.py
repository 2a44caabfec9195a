"""Free memory of a GPU and of the host, and the rules that decide by it: on CUDA graphs, and on where weights wait."""

from pathlib import Path
from typing import NamedTuple

import psutil
import torch

GIB = 2**30
ROOM = 0.25  # share of the memory that is left to decoding and all other work
GROWTH = 1.02  # memory of a captured step's activations over that of an eager step's
SPARE = GIB // 2  # bytes for a graph's launches and workspaces, copies of inputs, and forecasts
CGROUP = Path("/sys/fs/cgroup")


class FreeMemory(NamedTuple):
    """Bytes that may still be allocated, and bytes in all."""

    free: int
    total: int


def read_memory(device: torch.device, *, empties: bool = True) -> FreeMemory:
    """Read a GPU's memory, up to ``set_per_process_memory_fraction``; emptying PyTorch's cache can only free more."""
    if empties:
        torch.cuda.empty_cache()  # as every capture does
    free, total = torch.cuda.mem_get_info(device)
    if torch.cuda.get_allocator_backend() == "pluggable":  # which counts no memory
        return FreeMemory(free, total)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device.index)  # since 2.8
    stats = torch.cuda.memory_stats(device)
    reserved, allocated = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
    cached = reserved - allocated - stats["inactive_split_bytes.all.current"]  # in pools of graphs
    return FreeMemory(min(free, int(share * total) - reserved) + cached, int(share * total))


def read_host_memory() -> FreeMemory:
    """Read the memory of the host or its container."""
    host = psutil.virtual_memory()
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup, or "max"
        return FreeMemory(host.available, host.total)
    files = sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))  # their copies give way
    return FreeMemory(min(host.available, limit - used + files), min(host.total, limit))


def why_no_graph(memory: FreeMemory, peak: int) -> str | None:
    """Return why a step whose activations take ``peak`` bytes can't be captured, or None."""
    needed = int(GROWTH * peak) + SPARE
    if needed <= memory.free:
        return None
    return f"a graph of the step takes {needed / GIB:.1f} GiB, and {memory.free / GIB:.1f} GiB of the GPU are free"


def is_short(memory: FreeMemory, taken: int) -> bool:
    """Return True if less than a quarter of the memory stays free once ``taken`` more bytes are allocated."""
    return memory.free - taken < ROOM * memory.total
