"""Sizes of kernels by GPU: every GPU has some, and the compiled kernels fit GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dit_accel.kernels._triton.configs import CONFIGS

COLUMNS = {"float32", "tma", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120", ""}


def test_every_gpu_has_sizes_and_every_column_is_one():
    assert [kernel for kernel, columns in CONFIGS.items() if "" not in columns or not columns.keys() <= COLUMNS] == []


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux alone")
@pytest.mark.parametrize("gpus, op", [(["sm89", "sm100"], "masks, blocks of 64"), (["sm90"], "int8")], ids=str)
def test_attention_compiles_and_fits(gpus, op, tmp_path):
    """It stays below the limits of shared memory and of spills, on the matrix units. Not in the interpreter."""
    options = ["--gpus", *gpus, "--ops", f"attention, {op}", "--output", tmp_path / "compiled"]
    command = [sys.executable, "-m", "scripts.checks.compiled_kernels", *options]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True, capture_output=True)
    kernels = json.loads((tmp_path / "compiled.json").read_text())["kernels"]
    assert kernels and all(kernel["programs"] and kernel["products"] for kernel in kernels)
