"""Every CUDA source compiles, for each architecture it is made for. No GPU is needed, but a compiler is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dit_accel.kernels import _cuda

FOLDER = Path(_cuda.__file__).parent
PORTABLE = ("80", "89", "90")
HOPPER = ("90a",)
HOPPER_INSTRUCTIONS = re.compile(r"\b(wgmma|cp\.async\.bulk|mbarrier|setmaxnreg)\b")
INCLUDE = re.compile(r'#include "(.+)"')

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


def text_of(source: Path) -> str:
    """The source and the headers it includes."""
    text = source.read_text()
    return text + "".join(text_of(FOLDER / header) for header in INCLUDE.findall(text))


def targets() -> list:
    """Sources that use Hopper's own instructions for Hopper, all others for every architecture."""
    return [
        pytest.param(source, architecture, id=f"{source.stem}-sm_{architecture}")
        for source in sorted(FOLDER.glob("*.cu"))
        for architecture in (HOPPER if HOPPER_INSTRUCTIONS.search(text_of(source)) else PORTABLE)
    ]


@pytest.mark.parametrize(("source", "architecture"), targets())
def test_source_compiles_without_a_warning(source, architecture, tmp_path):
    compile_source(source, architecture, tmp_path / "out")


def test_a_barrier_on_which_every_lane_arrives_compiles(tmp_path):
    """The form for racecheck is in a header, so that one source is enough."""
    compile_source(FOLDER / "attention.cu", *HOPPER, tmp_path / "out", "-DEVERY_LANE_ARRIVES=1")


def compile_source(source: Path, architecture: str, output: Path, *more: str) -> None:
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    flags = ["-cubin", "-std=c++17", "-Werror", "all-warnings", "-gencode", target, *more]
    run = subprocess.run(["nvcc", *flags, "-o", output, source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert output.stat().st_size
