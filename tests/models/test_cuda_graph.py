"""Checks of a step before its capture, with PyTorch's GPU checks faked."""

import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dit_accel.loop import timing
from dit_accel.models.free_memory import GIB, FreeMemory
from dit_accel.models.graphs.cuda_graph import SYNCHRONIZES, CaptureTrial, CudaGraph

CPU = torch.device("cpu")
FREE = FreeMemory(99 * GIB, 99 * GIB)


def wait():
    warnings.warn(f"{SYNCHRONIZES} (Triggered internally)", stacklevel=1)
    return 7


def elsewhere(job):
    thread = threading.Thread(target=job)
    thread.start(), thread.join()


@pytest.fixture
def modes(monkeypatch):
    """The sync debug modes that were set, one after the other; setting one warns, as PyTorch does."""
    found = []

    def set_mode(mode):
        found.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(timing, "gpu_stopwatch", lambda device: timing.stopwatch())
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    return found


def test_a_wait_is_found_where_it_is(modes):
    """Also where it was shown before; the mode and the filters are as before, also where the step raises."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        filters = [*warnings.filters]
        wait()
        output, trial = CudaGraph.watch(wait, CPU)
        with pytest.raises(ZeroDivisionError):
            CudaGraph.watch(lambda: 1 / 0, CPU)
        assert warnings.filters == filters
    assert output == 7 and modes == ["warn", 0, "warn", 0] and len(shown) == 1 and trial.is_complete
    assert "test_cuda_graph.py, line" in trial.why_not("always", FREE)


def test_other_warnings_pass_through(modes):
    with pytest.warns(FutureWarning, match="will be renamed"):
        _, trial = CudaGraph.watch(lambda: warnings.warn("will be renamed", FutureWarning, stacklevel=1), CPU)
    assert trial.waits is None and trial.launched() > 0 and trial.took() > 0


def test_waits_of_other_threads_are_hidden_and_theirs(modes):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        _, trial = CudaGraph.watch(lambda: elsewhere(wait), CPU)
    assert shown == [] and trial.waits is None


def test_two_threads_watch_at_a_time(modes):
    """The first to end takes neither the filter nor the mode from the other."""
    both, ended, found = threading.Barrier(2), threading.Event(), {}

    def step(name):
        both.wait(60)
        if name == "last":
            ended.wait(60)
        wait()

    def watch(name):
        found[name] = CudaGraph.watch(lambda: step(name), CPU)[1]
        ended.set()

    threads = [threading.Thread(target=watch, args=(name,)) for name in ("first", "last")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[name].waits and found[name].is_complete for name in ("first", "last"))
    assert modes == ["warn", "warn", 0]


def test_a_filter_that_another_thread_has_removed_makes_a_trial_incomplete(modes):
    """Waits may have been missed, so such a step is measured again."""
    assert not CudaGraph.watch(lambda: elsewhere(warnings.resetwarnings), CPU)[1].is_complete


def test_only_a_capture_hides_that_a_graph_is_empty(monkeypatch):
    """As graphs between two collectives may be; the filters are as before."""

    def end(*_):
        warnings.warn("The CUDA Graph is empty. This usually means …", stacklevel=1)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(CudaGraph, "_aside", lambda self: nullcontext())
    monkeypatch.setattr(CudaGraph, "_begin", lambda self: setattr(self, "_capturing", SimpleNamespace(__exit__=end)))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        filters = [*warnings.filters]
        assert CudaGraph(CPU, None).capture(lambda: 7) == 7
        assert shown == [] and warnings.filters == filters
        end()
    assert len(shown) == 1


def test_steps_on_several_gpus_are_captured_from_a_smaller_share_of_launches():
    """There a GPU's time includes waiting for the other hosts."""
    trials = [CaptureTrial(None, lambda share=share: share, lambda: 1.0) for share in (0.6, 0.4)]
    assert [trial.why_not("auto", FREE, is_shared=True) is None for trial in trials] == [True, False]
    assert trials[0].why_not("auto", FREE) is not None


def test_nothing_is_captured_under_an_allocator_that_counts_no_memory(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert CudaGraph.why_not(torch.device("cuda")) == "another allocator than PyTorch's is set"
