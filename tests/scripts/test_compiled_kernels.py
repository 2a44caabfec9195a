"""Kernels compiled for GPUs that are not available: a small run of the script with a kernel that once did not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux alone")
def test_masks_fit_a_consumer_gpu(tmp_path):
    """99 KiB of shared memory, through the matrix units, with tiles copied ahead. Not in the interpreter."""
    command = [
        sys.executable,
        "-m",
        "scripts.checks.compiled_kernels",
        "--gpus",
        "sm89",
        "--ops",
        "attention, masks",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    compiled = tmp_path / "compiled"
    subprocess.run([*command, "--output", compiled], cwd=ROOT, env=environment, check=True, capture_output=True)
    (kernel,) = json.loads((tmp_path / "compiled.json").read_text())["kernels"]
    assert kernel["shared"] <= kernel["most_shared"] == 99 * 1024
    assert kernel["programs"] >= 1 and kernel["products"] and kernel["copies"] and kernel["tile_loads"]
    assert "| sm89 | attention, masks | `attention` |" in (tmp_path / "compiled.md").read_text()
