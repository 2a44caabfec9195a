"""Checks of a step before its capture, with PyTorch's GPU checks faked."""

import warnings

import pytest
import torch

from dit_accel.loop import timing
from dit_accel.models.graphs import cuda_graph
from dit_accel.models.graphs.cuda_graph import CaptureTrial, CudaGraph


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
    monkeypatch.setattr(cuda_graph, "_room", lambda device: 0.5)
    return found


def test_a_wait_is_found_where_it_is(modes):
    """The first of several; the mode is as before, also where the step raises."""

    def step():
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        return 7

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output, trial = CudaGraph.watch(step, torch.device("cpu"))
        with pytest.raises(ZeroDivisionError):
            CudaGraph.watch(lambda: 1 / 0, torch.device("cpu"))
    assert output == 7 and "test_cuda_graph.py, line" in trial.why_not("always") and modes == ["warn", 0, "warn", 0]


@pytest.mark.filterwarnings("ignore:Synchronization")
def test_other_warnings_pass_through(modes):
    with pytest.warns(FutureWarning, match="will be renamed"):
        _, trial = CudaGraph.watch(
            lambda: warnings.warn("will be renamed", FutureWarning, stacklevel=1), torch.device("cpu")
        )
    assert trial.waits is None and trial.launched() > 0 and trial.took() > 0


@pytest.mark.parametrize(
    ("launched", "wanted", "is_shared", "captures"),
    [
        (0.6, "auto", False, False),
        (0.6, "auto", True, True),
        (0.4, "auto", True, False),
    ],
    ids=["gpu-bound", "waits-for-others-too", "shared-gpu-bound"],
)
def test_steps_are_captured_where_the_gpu_waits_for_the_host(launched, wanted, is_shared, captures):
    """On several GPUs, a GPU's time includes waiting for the other hosts."""
    trial = CaptureTrial(None, lambda: launched, lambda: 1.0)
    assert (trial.why_not(wanted, is_shared=is_shared) is None) == captures
