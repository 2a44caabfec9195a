"""A stand-in for Triton's driver that names a GPU and has none, and what ptxas says of kernels compiled under it."""

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
# Products on the matrix units, copies to shared memory that run beside them, and loads of whole tiles from there.
INSTRUCTIONS = {
    "products": r"\b(?:HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|DMMA)\b",
    "copies": r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b",
    "tile_loads": r"\bLDSM\b",
}


class Gpu(NamedTuple):
    """A compute capability and what a multiprocessor of it has (CUDA C++ Programming Guide, table of capabilities).

    Args:
        capability: times ten.
        shared: bytes of shared memory that one program may take.
        of_all: bytes that all programs of a multiprocessor share.
        warps: that it holds.
    """

    capability: int
    shared: int
    of_all: int
    warps: int


KIB = 1024
REGISTERS = 65536  # of a multiprocessor, 32 bits each
GPUS = {
    "sm80": Gpu(80, 163 * KIB, 164 * KIB, 64),  # A100
    "sm89": Gpu(89, 99 * KIB, 100 * KIB, 48),  # RTX 4090, L40S
    "sm120": Gpu(120, 99 * KIB, 100 * KIB, 48),  # RTX 5090
    "sm90": Gpu(90, 227 * KIB, 228 * KIB, 64),  # H100, H200: the yardstick
}


class _Driver:
    """What Triton's launcher asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _standing_in(gpu: Gpu, kernels: list[Any]) -> Iterator[None]:
    """Within, Triton's ops take CPU tensors, choose what they would on ``gpu``, and put what they compile into
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
        for module in [each for name, each in sys.modules.items() if name.startswith("dit_accel.kernels")]:
            if hasattr(module, "hopper_limit"):
                stack.enter_context(patch.object(module, "hopper_limit", lambda _: limit))
            if hasattr(module, "is_hopper_or_later"):
                stack.enter_context(patch.object(module, "is_hopper_or_later", lambda _: is_hopper))
        launch._COMPILED.clear()
        yield


def compiled(gpu: Gpu, call: Callable[[], Any]) -> list[dict[str, Any]]:
    """What each kernel is made of that an op launches."""
    kernels: list[Any] = []
    with _standing_in(gpu, kernels):
        call()
    found = {kernel.hash: kernel for kernel in kernels}
    return [_described(gpu, kernel) for kernel in found.values()]


def _described(gpu: Gpu, kernel: Any) -> dict[str, Any]:
    """Per program: warps, registers of a thread, bytes of shared memory and of spills, instructions; and how many
    programs a multiprocessor holds.
    """
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(kernel.asm["ptx"])
        target = re.search(r"\.target (\w+)", kernel.asm["ptx"]).group(1)
        ptxas = "ptxas-blackwell" if gpu.capability >= 100 else "ptxas"
        told = _tool(ptxas, "-v", f"--gpu-name={target}", str(source), "-o", str(binary))
        code = _tool("cuobjdump", "-sass", str(binary))
    registers = int(re.search(r"Used (\d+) registers", told).group(1))
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", told))
    counts = Counter({name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()})
    limits = [gpu.warps // warps, REGISTERS // (32 * warps * _rounded(registers, 8))]
    limits += [gpu.of_all // (shared + KIB)] if shared else []  # a program takes 1 KiB more than it asks for
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
