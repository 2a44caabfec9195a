"""Rules that decide by free memory, with the numbers of cards; and what is read where."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from dit_accel.models import free_memory
from dit_accel.models.free_memory import GIB, FreeMemory, is_short, read_host_memory, read_memory, why_no_graph

CARDS = {  # GiB free, in all and of a step's activations; graph fits, and other work must wait for its memory
    "a-quarter-stays-free": (30, 80, 2, True, False),
    "15%-free": (12, 80, 2, True, True),
    "as-much-as-the-eager-step": (2.5, 24, 2, False, True),
    "two-percent-more": (2.55, 24, 2, True, True),
    "nothing-free": (0, 24, 0, False, True),
}


@pytest.mark.parametrize("free, total, peak, fits, waits", CARDS.values(), ids=CARDS)
def test_a_graph_fits_where_its_eager_step_and_half_a_gib_do(free, total, peak, fits, waits):
    memory, taken = FreeMemory(int(free * GIB), total * GIB), peak * GIB
    reason = f"a graph of the step takes {1.02 * peak + 0.5:.1f} GiB, and {free:.1f} GiB of the GPU are free"
    assert (why_no_graph(memory, taken), is_short(memory, taken)) == (None if fits else reason, waits)


SHARES = {"whole": (1.0, 30 + 9, "native"), "half": (0.5, 40 - 25 + 9, "native"), "uncounted": (1.0, 30, "pluggable")}


@pytest.mark.parametrize("share, free, backend", SHARES.values(), ids=SHARES)
def test_memory_that_pytorch_caches_is_free(monkeypatch, share, free, backend):
    """But for parts of segments that are in use; a process may be limited to a share of a GPU, which needs no index."""
    numbers = {"reserved_bytes": 25, "allocated_bytes": 15, "inactive_split_bytes": 1}
    stats = {f"{name}.all.current": number for name, number in numbers.items()}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda i: {None: share}[i], raising=False)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert read_memory(torch.device("cuda")) == (free, int(80 * share))


@pytest.mark.parametrize("limit, expected", [("50\n", (25, 50)), ("max\n", (60, 100)), (None, (60, 100))])
def test_a_container_may_limit_the_host(monkeypatch, tmp_path, limit, expected):
    """It counts copies of files, such as those of loaded weights, which give way."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=60, total=100))
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit), (tmp_path / "memory.current").write_text("30\n")
        (tmp_path / "memory.stat").write_text("anon 20\nfile 10\nshmem 3\ninactive_file 5\n")  # without active_file
    assert read_host_memory() == expected
