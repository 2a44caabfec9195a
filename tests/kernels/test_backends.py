"""An automatic choice follows the device; an explicit one runs or raises."""

import sys

import pytest
import torch

from dit_accel.errors import BackendError
from dit_accel.kernels import backend_status, backends
from dit_accel.kernels.backends import resolve_backend


def test_auto_runs_the_reference_on_a_cpu():
    assert resolve_backend("auto", torch.zeros(1)) == "reference"


@pytest.mark.parametrize(
    ("backend", "dtype", "interpreter", "message"),
    [
        ("cudnn", torch.float32, "0", r"backend must be 'auto' or one of \('reference', .*\), got 'cudnn'"),
        ("triton", torch.float32, "0", "backend 'triton' can't run here: the tensors are on 'cpu'"),
        ("cuda", torch.float32, "0", "backend 'cuda' can't run here: the tensors are on 'cpu'"),
        ("triton", torch.bfloat16, "1", "wrong results for bfloat16"),
    ],
)
def test_an_explicit_choice_that_can_not_run_raises(backend, dtype, interpreter, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    with pytest.raises(BackendError, match=message):
        resolve_backend(backend, torch.zeros(1, dtype=dtype), {"cuda": None, "triton": None})


def test_a_gpu_of_amd_runs_the_reference(monkeypatch):
    """ROCm's devices are of type cuda too, and gfx90a has the compute capability of an H100."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "the GPU is AMD's" in backends._triton_problem(torch.device("cuda:0"), torch.float16)


def test_status_survives_a_broken_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert backend_status()["reference"] == "ok" and "can't be imported" in backend_status()["triton"]
