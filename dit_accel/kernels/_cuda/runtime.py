"""Compilation and launch of ``.cu`` files by NVRTC and the driver, without a compiler on the user's machine.

torch's CUDA wheels contain NVRTC, and the driver contains libcuda; both are called through ctypes. A compiled kernel is
cached on disk (``$DIT_ACCEL_CACHE``, else ``$XDG_CACHE_HOME/dit_accel``, else ``~/.cache/dit_accel``) under a hash of
its sources, its options and the compiler's version, and in memory once loaded.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dit_accel.errors import KernelError
from dit_accel.kernels.cache_folder import cache_folder

SOURCES = Path(__file__).parent
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT

Defines = tuple[tuple[str, str | int], ...]
DEBUG_DEFINES: Defines = ()  # added to every kernel's; set before the first launch


class Kernel:
    """One loaded ``__global__`` function on one device."""

    def __init__(self, function: ctypes.c_void_p, context: ctypes.c_void_p, device: torch.device, shared: int) -> None:
        self._function = function
        self._context = context
        self._device = device
        self._shared_bytes = shared

    def launch(self, programs: int, threads: int, arguments: Sequence[Any]) -> None:
        """Launch on the device's current stream; :func:`_c_value` says how ``arguments`` are passed."""
        values = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        # Triton's way: torch.cuda.current_stream takes longer than the launch
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._device.index))
        is_current = torch.cuda.current_device() == self._device.index
        with contextlib.nullcontext() if is_current else torch.cuda.device(self._device):
            launch = self._function, programs, 1, 1, threads, 1, 1, self._shared_bytes, stream, pointers, None
            error = driver().cuLaunchKernel(*launch)
            if error == INVALID_CONTEXT:  # the thread has not used the device yet
                _check(driver().cuCtxSetCurrent(self._context), "context")
                error = driver().cuLaunchKernel(*launch)
        _check(error, "launch")


@functools.cache
def kernel(name: str, device: torch.device, defines: Defines, shared_bytes: int) -> Kernel:
    """Return the function ``name`` of the source of that name, compiled for ``device`` with these macros.

    Its launches take ``shared_bytes`` of shared memory.

    Raises:
        KernelError: NVRTC or the driver refuses; the message holds their log.
    """
    torch.cuda.init()
    function, context, module = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"sm_{major}{minor}{'a' if major == 9 else ''}"  # sm_90 lacks wgmma
    code = compile_source(f"{name}.cu", architecture, defines)
    with torch.cuda.device(device):  # this is lazy: the thread may still have no context
        _check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index), "context")
        _check(driver().cuCtxSetCurrent(context), "context")
        _check(driver().cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
        _check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
        _check(driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared_bytes), "shared memory")
    return Kernel(function, context, device, shared_bytes)


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return why CUDA C++ can't be compiled and launched for a CUDA device, or None."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    try:
        library = driver()
    except OSError as error:
        return f"the CUDA driver, libcuda.so.1, can't be loaded ({error})"
    if not hasattr(library, "cuTensorMapEncodeTiled"):
        return "the CUDA driver is older than 12.0"
    try:
        known = _nvrtc_architectures()
    except OSError as error:
        return f"NVRTC (pip install nvidia-cuda-nvrtc) can't be loaded ({error})"
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor not in known or (major == 9 and _nvrtc_version() < (12, 0)):
        version = ".".join(map(str, _nvrtc_version()))
        return f"NVRTC {version} does not know the GPU's compute capability {major}.{minor}"
    return None


def resting_counters(owner: str, count: int, device: torch.device) -> torch.Tensor:
    """Return int32 ``[count]`` on the device, which is zero before and after each launch.

    Launches of a kernel on one stream run one after the other and share one tensor. A captured graph may be replayed on
    any stream while other graphs run: each launch in it gets its own counters, which the graph clears.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _counters_of_stream(owner, count, device, torch._C._cuda_getCurrentRawStream(device.index))


@functools.cache
def _counters_of_stream(owner: str, count: int, device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def compile_source(source: str, architecture: str, defines: Defines = ()) -> bytes:
    """Return machine code (a cubin) of a file of this folder, from the disk cache or from NVRTC."""
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        f"--include-path={SOURCES}",
        *(f"--define-macro={name}={value}" for name, value in (*defines, *DEBUG_DEFINES)),
    ]
    digest = hashlib.sha256(repr((options[:2] + options[3:], _nvrtc_version())).encode())
    for file in (SOURCES / source, *sorted(SOURCES.glob("*.cuh"))):
        digest.update(file.read_bytes())
    cached = cache_folder() / f"{Path(source).stem}-{architecture}-{digest.hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError):
        if code := cached.read_bytes():
            return code
    code = _compile((SOURCES / source).read_text(), source, options)
    with contextlib.suppress(OSError):  # without a writable cache each process compiles again
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            written = Path(folder) / cached.name
            written.write_bytes(code)
            written.replace(cached)  # atomic
    return code


def _compile(text: str, source: str, options: list[str]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.encode(), 0, None, None):
        raise KernelError(f"NVRTC could not read {source}")
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), flags):
            log = _output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise KernelError(f"NVRTC could not compile {source}: {log.decode(errors='replace')}")
        return _output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _output(program: ctypes.c_void_p, get_size: Any, get: Any) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


def _c_value(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p()
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else argument


def _check(error: int, what: str) -> None:
    if error:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(error, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise KernelError(f"the CUDA driver failed at {what}: {reason} ({error})")


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Load torch's own NVRTC, else one that the system's loader finds."""
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}" if torch.version.cuda else "libnvrtc.so"
    package = importlib.util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or ()) if package else []
    if not (found := [path for folder in folders for path in Path(folder).glob(f"*/lib/{name}")]):
        return ctypes.CDLL(name)
    for builtins in found[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))  # NVRTC loads it by name, and its folder is on no search path
    return ctypes.CDLL(str(found[0]))


@functools.cache
def _nvrtc_architectures() -> tuple[int, ...]:
    """Compute capabilities that NVRTC supports, as 80, 89, 90, …"""
    count = ctypes.c_int()
    _nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    architectures = (ctypes.c_int * count.value)()
    _nvrtc().nvrtcGetSupportedArchs(architectures)
    return tuple(architectures)


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value
