"""Compile kernels for a GPU that is not present, with a replacement for Triton's driver, and read their figures."""

import re
import subprocess
import sys
import tempfile
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
from dit_accel.kernels._triton import configs, launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PRODUCTS = r"\b(?:[HIQ]MMA|[HIQ]GMMA|UTC\w*MMA)\b"  # instructions of the matrix units
KIB = 1024
REGISTERS = 65536  # of a multiprocessor, 32 bits each


class Gpu(NamedTuple):
    """Compute capability and limits of a multiprocessor (CUDA C++ Programming Guide, table of capabilities).

    Args:
        capability: times ten.
        shared: KiB of shared memory for one program; all programs of a multiprocessor have 1 KiB more.
        warps: resident warps of a multiprocessor.
    """

    capability: int
    shared: int
    warps: int


GPUS = {
    "sm80": Gpu(80, 163, 64),  # A100
    "sm86": Gpu(86, 99, 48),  # RTX 3090, A10
    "sm89": Gpu(89, 99, 48),  # RTX 4090, L40S
    "sm90": Gpu(90, 227, 64),  # H100, H200
    "sm100": Gpu(100, 227, 64),  # B200
    "sm120": Gpu(120, 99, 48),  # RTX 5090
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
    """Let Triton accept CPU tensors, choose sizes for ``gpu``, and append compiled kernels to ``kernels``."""
    run = JITFunction.run
    limit = None if gpu.capability == 90 else f"compute capability {gpu.capability / 10}"
    answers = {"hopper_limit": lambda _: limit, "architecture": lambda _: f"sm{gpu.capability}"}

    def compile_alone(kernel: JITFunction, *arguments: Any, **named: Any) -> None:
        kernels.append(run(kernel, *arguments, **{**named, "warmup": True}))

    with ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", _Driver(gpu.capability)))
        stack.enter_context(patch.object(JITFunction, "run", compile_alone))
        stack.enter_context(patch.dict(backends._PROBLEMS, triton=lambda *_: None))
        for module in [item for name, item in sys.modules.items() if name.startswith("dit_accel.kernels")]:
            for name in answers.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, answers[name]))
        configs._config.cache_clear()
        launch._COMPILED.clear()
        yield
    configs._config.cache_clear()
    launch._COMPILED.clear()


def compiled(gpu: Gpu, call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Figures of each kernel that an op launches."""
    kernels: list[Any] = []
    with _standing_in(gpu, kernels):
        call()
    return [_described(gpu, kernel) for kernel in {kernel.hash: kernel for kernel in kernels}.values()]


def _described(gpu: Gpu, kernel: Any) -> dict[str, Any]:
    """Figures of a kernel: warps of a program, registers and spilled bytes of a thread, KiB of shared memory, programs
    that fit a multiprocessor, and the share of instructions that run on the matrix units.
    """
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared / KIB
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        command = [TOOLS / "cuobjdump", "-sass", "-res-usage", binary.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", code).groups())
    limits = [gpu.warps // warps, REGISTERS // (32 * warps * -(-registers // 8) * 8)]
    limits += [int((gpu.shared + 1) // (shared + 1))] if shared else []  # the driver adds 1 KiB to each program
    instructions = len(re.findall(r"(?m)^\s+/\*[0-9a-f]{4,}\*/\s+\S", code))
    return {
        "kernel": kernel.name.lstrip("_"),
        "warps": warps,
        "registers": registers,
        "shared": round(shared, 1),
        "spilled": spilled,
        "programs": min(limits),
        "products": round(len(re.findall(PRODUCTS, code)) / instructions, 3),
    }
