"""Compile kernels for a GPU that is not present, with a replacement for Triton's driver, and read ptxas' figures."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dit_accel.kernels import backends
from dit_accel.kernels._triton import launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Instructions: products on the matrix units, asynchronous copies to shared memory, and loads of whole tiles from it.
INSTRUCTIONS = {
    "products": r"\b(?:HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|DMMA)\b",
    "copies": r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b",
    "tile_loads": r"\bLDSM\b",
}


class Gpu(NamedTuple):
    """Compute capability and limits of a multiprocessor (CUDA C++ Programming Guide, table of capabilities).

    Args:
        capability: times ten.
        shared: bytes of shared memory available to one program.
        of_all: bytes shared by all programs of a multiprocessor.
        warps: resident warps per multiprocessor.
    """

    capability: int
    shared: int
    of_all: int
    warps: int


KIB = 1024
REGISTERS = 65536  # per multiprocessor, 32 bits each
GPUS = {
    "sm80": Gpu(80, 163 * KIB, 164 * KIB, 64),  # A100
    "sm89": Gpu(89, 99 * KIB, 100 * KIB, 48),  # RTX 4090, L40S
    "sm120": Gpu(120, 99 * KIB, 100 * KIB, 48),  # RTX 5090
    "sm90": Gpu(90, 227 * KIB, 228 * KIB, 64),  # H100, H200: for comparison
}


class _Driver:
    """Answers the calls of Triton's launcher to its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _standing_in(gpu: Gpu, kernels: list[Any]) -> Iterator[None]:
    """Let Triton's ops accept CPU tensors, choose their settings for ``gpu``, and append compiled kernels to
    ``kernels``.
    """
    run, is_hopper = JITFunction.run, gpu.capability == 90
    limit = None if is_hopper else f"compute capability {gpu.capability / 10}"

    def compile_alone(kernel: JITFunction, *arguments: Any, **named: Any) -> None:
        kernels.append(run(kernel, *arguments, **{**named, "warmup": True}))

    with ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", _Driver(gpu.capability)))
        stack.enter_context(patch.object(JITFunction, "run", compile_alone))
        stack.enter_context(patch.dict(backends._PROBLEMS, triton=lambda *_: None))
        for module in [item for name, item in sys.modules.items() if name.startswith("dit_accel.kernels")]:
            if hasattr(module, "hopper_limit"):
                stack.enter_context(patch.object(module, "hopper_limit", lambda _: limit))
            if hasattr(module, "is_hopper_or_later"):
                stack.enter_context(patch.object(module, "is_hopper_or_later", lambda _: is_hopper))
        launch._COMPILED.clear()
        yield


def compiled(gpu: Gpu, call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Resource figures of each kernel that an op launches."""
    kernels: list[Any] = []
    with _standing_in(gpu, kernels):
        call()
    found = {kernel.hash: kernel for kernel in kernels}
    return [_described(gpu, kernel) for kernel in found.values()]


def _described(gpu: Gpu, kernel: Any) -> dict[str, Any]:
    """Figures per program: warps, registers per thread, bytes of shared memory and of spills, instructions; and the
    number of programs per multiprocessor.
    """
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(kernel.asm["ptx"])
        target = re.search(r"\.target (\w+)", kernel.asm["ptx"]).group(1)
        ptxas = "ptxas-blackwell" if gpu.capability >= 100 else "ptxas"
        printed = _tool(ptxas, "-v", f"--gpu-name={target}", str(source), "-o", str(binary))
        code = _tool("cuobjdump", "-sass", str(binary))
    registers = int(re.search(r"Used (\d+) registers", printed).group(1))
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", printed))
    counts = Counter({name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()})
    limits = [gpu.warps // warps, REGISTERS // (32 * warps * _rounded(registers, 8))]
    limits += [gpu.of_all // (shared + KIB)] if shared else []  # the driver adds 1 KiB per program
    return {
        "kernel": kernel.name,
        "warps": warps,
        "registers": registers,
        "shared": shared,
        "most_shared": gpu.shared,
        "spilled": spills,
        **counts,
        "programs": min(limits),
    }


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
