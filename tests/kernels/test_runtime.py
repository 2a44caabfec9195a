"""The CUDA runtime on a machine without a GPU: its disk cache, its arguments and its errors."""

import ctypes
import shutil
import subprocess
import types

import pytest
import torch

from dit_accel.kernels._cuda import runtime
from dit_accel.kernels._cuda.attention import tensor_map_limit


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("source", sorted(runtime.SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_sources_compile_without_a_warning_or_a_spill(source, tmp_path):
    flags = ["-cubin", "-std=c++17", "-Werror", "all-warnings", "-gencode", "arch=compute_90a,code=sm_90a"]
    command = ["nvcc", *flags, "-Xptxas", "-v", "-o", tmp_path / "out", source]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and " 0 bytes spill stores" in run.stderr, run.stderr


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
    first = runtime.compile_source("slices.cu", "sm_90a")
    assert runtime.compile_source("slices.cu", "sm_90a") == first and len(compiled) == 1
    assert "--gpu-architecture=sm_90a" in compiled[0]
    runtime.compile_source("slices.cu", "sm_80")
    runtime.compile_source("slices.cu", "sm_90a", (("WIDTH", 8),))
    assert len(compiled) == 3 and "--define-macro=WIDTH=8" in compiled[2]


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
    runtime.compile_source("slices.cu", "sm_90a")
    runtime.compile_source("slices.cu", "sm_90a")
    assert len(compiled) == 2


def test_an_empty_file_in_the_cache_counts_as_none(compiled, tmp_path):
    """And no other file is left behind."""
    runtime.compile_source("slices.cu", "sm_90a")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(b"")
    runtime.compile_source("slices.cu", "sm_90a")
    assert len(compiled) == 2 and [path.name for path in (tmp_path / "cache").iterdir()] == [file.name]


def test_a_user_without_a_home_has_a_cache_all_the_same(monkeypatch):
    monkeypatch.delenv("DIT_ACCEL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(runtime.Path, "home", no_home)
    assert runtime.cache_folder().name.startswith("dit_accel-")


def test_an_unknown_gpu_is_a_reason_and_not_a_failed_compilation(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(runtime, "driver", lambda: types.SimpleNamespace(cuTensorMapEncodeTiled=None))
    monkeypatch.setattr(runtime, "_nvrtc_architectures", lambda: (80, 89, 90))
    monkeypatch.setattr(runtime, "_nvrtc_version", lambda: (12, 8))
    for capability, reason in (((9, 0), None), ((12, 1), "NVRTC 12.8 does not know the GPU's compute capability 12.1")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        runtime.why_not.cache_clear()
        assert runtime.why_not(torch.device("cuda", 0)) == reason
    runtime.why_not.cache_clear()


def test_strides_of_axes_of_length_one_mean_nothing():
    x = torch.zeros(1, 300, 2, 64, dtype=torch.float16)
    assert tensor_map_limit("x", x.as_strided(x.shape, (7, 128, 64, 1))) is None
    assert "positive multiples of 16 bytes" in tensor_map_limit("x", x[:, :1].expand(1, 300, 2, 64))
    assert "call .contiguous()" in tensor_map_limit("x", torch.zeros(1, 300, 2, 66).half()[..., :64])


def test_arguments_have_the_widths_of_c():
    tensor = torch.zeros(3)
    values = [runtime._c_value(x) for x in (tensor, None, 7, 0.5, ctypes.c_longlong(1 << 40))]
    assert [type(value) for value in values] == [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_longlong,
    ]  # fmt: skip
    assert values[0].value == tensor.data_ptr() and values[1].value is None
    assert [value.value for value in values[2:]] == [7, 0.5, 1 << 40]
