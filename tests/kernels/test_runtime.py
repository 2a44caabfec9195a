"""The CUDA runtime on a machine without a GPU: its disk cache, its arguments and what it says where it can't run."""

import ctypes

import pytest
import torch

from dit_accel.errors import BackendError
from dit_accel.kernels import backend_status, pack_bits
from dit_accel.kernels._cuda import runtime


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list[list[str]]:
    """NVRTC is replaced by a list of the option lists that it was called with."""
    calls = []

    def compile_(text: str, source: str, options: list[str]) -> bytes:
        calls.append(options)
        return f"{source} {len(calls)}".encode()

    monkeypatch.setattr(runtime, "_compile", compile_)
    monkeypatch.setattr(runtime, "_nvrtc_version", lambda: (13, 0))
    monkeypatch.setenv("DIT_ACCEL_CACHE", str(tmp_path / "cache"))
    return calls


def test_machine_code_is_cached_by_source_options_and_architecture(compiled):
    first = runtime.compile_source("packing.cu", "sm_90a")
    assert runtime.compile_source("packing.cu", "sm_90a") == first
    assert len(compiled) == 1
    assert "--gpu-architecture=sm_90a" in compiled[0]
    runtime.compile_source("packing.cu", "sm_80")
    runtime.compile_source("packing.cu", "sm_90a", (("WIDTH", 8),))
    assert len(compiled) == 3
    assert "--define-macro=WIDTH=8" in compiled[2]


def test_a_changed_source_or_header_is_compiled_anew(compiled, monkeypatch, tmp_path):
    (tmp_path / "op.cu").write_text("a")
    (tmp_path / "op.cuh").write_text("b")
    monkeypatch.setattr(runtime, "SOURCES", tmp_path)
    for name in ("op.cu", "op.cuh"):
        runtime.compile_source("op.cu", "sm_90a")
        (tmp_path / name).write_text("changed")
    runtime.compile_source("op.cu", "sm_90a")
    assert len(compiled) == 3


def test_a_cache_that_can_not_be_written_costs_only_time(compiled, monkeypatch):
    monkeypatch.setenv("DIT_ACCEL_CACHE", "/proc/nowhere")
    runtime.compile_source("packing.cu", "sm_90a")
    runtime.compile_source("packing.cu", "sm_90a")
    assert len(compiled) == 2


def test_arguments_have_the_widths_of_c():
    tensor = torch.zeros(3)
    values = [runtime._c_value(x) for x in (tensor, None, 7, 0.5, ctypes.c_longlong(1 << 40))]
    assert [type(value) for value in values] == [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_longlong,
    ]  # fmt: skip
    assert values[0].value == tensor.data_ptr() and values[1].value is None
    assert [value.value for value in values[2:]] == [7, 0.5, 1 << 40]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_an_explicit_choice_raises():
    with pytest.raises(BackendError, match="backend 'cuda' can't run here: the tensors are on 'cpu'"):
        pack_bits(torch.ones(8, dtype=torch.bool), backend="cuda")
    assert "CUDA" in backend_status()["cuda"]
