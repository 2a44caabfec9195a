"""Choice of an op's implementation: ``auto`` takes the first that can run, an explicit choice runs or raises."""

import functools
import os
from collections.abc import Mapping

import torch

from dit_accel.errors import BackendError, UnsupportedError

MINIMUM_TRITON = (3, 6)
MINIMUM_CAPABILITY = (8, 0)  # bf16 matrix units and asynchronous copies
FP8_CAPABILITY = (8, 9)
TRITON_ONLY: Mapping[str, str | None] = {"triton": None}


def resolve_backend(backend: str, tensor: torch.Tensor, limits: Mapping[str, str | None] = TRITON_ONLY) -> str:
    """Return the backend that runs an op whose main argument is ``tensor``.

    ``limits`` are the op's backends besides the reference, in the order in which "auto" tries them, each with the
    reason why it does not support the call's other arguments, or None.

    Raises:
        BackendError: ``backend`` is unknown to the op, or can't run on the tensor's device.
        UnsupportedError: ``backend`` can run here, but can't take these arguments.
    """
    if backend == "auto":
        if not tensor.is_cuda:
            return "reference"
        able = (name for name, limit in limits.items() if limit is None and _runs_on(name, tensor.device, tensor.dtype))
        return next(able, "reference")
    if backend == "reference":
        return backend
    if backend not in limits:
        raise BackendError(f"backend must be 'auto' or one of {('reference', *limits)}, got {backend!r}")
    if problem := _PROBLEMS[backend](tensor.device, tensor.dtype):
        raise BackendError(f"backend {backend!r} can't run here: {problem}; use backend='auto' or 'reference'")
    if limits[backend]:
        raise UnsupportedError(f"backend {backend!r} can't take this call: {limits[backend]}; use backend='auto'")
    return backend


def backend_status() -> dict[str, str]:
    """Return for each backend "ok", or the reason why it can't run on this machine. Never raises."""
    status = {"reference": "ok"}
    for name, problem_of in _PROBLEMS.items():
        try:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            status[name] = problem_of(torch.device(device), None) or "ok"
        except Exception as error:  # a broken driver or installation may raise anything
            status[name] = f"{type(error).__name__}: {error}"
    return status


def hopper_limit(tensor: torch.Tensor) -> str | None:
    """Return why a kernel with Hopper's instructions (wgmma, TMA) can't run on the tensor's device, or None."""
    if not tensor.is_cuda:
        return None  # a missing GPU is reported by the backend
    capability = _capability(tensor.device)
    return None if capability == (9, 0) else f"it needs compute capability 9.0 (H100, H200), got {capability}"


def float8_limit(tensor: torch.Tensor) -> str | None:
    """Return why the matrix units of the tensor's GPU can't multiply e4m3, or None."""
    if not tensor.is_cuda or _capability(tensor.device) >= FP8_CAPABILITY:
        return None
    return f"float8 needs compute capability {FP8_CAPABILITY} or more, got {_capability(tensor.device)}"


@functools.cache  # called hundreds of times per step
def _runs_on(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    return _PROBLEMS[backend](device, dtype) is None


def _triton_problem(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Return why Triton kernels can't run on tensors of this device and dtype, or None."""
    try:
        import triton
    except ImportError as error:
        return f"triton can't be imported ({error})"
    if _release(triton.__version__) < MINIMUM_TRITON:
        return f"triton is {triton.__version__}, and the kernels need {'.'.join(map(str, MINIMUM_TRITON))} or later"
    if os.environ.get("TRITON_INTERPRET") == "1":
        # triton 3.6 keeps bfloat16 as uint16 there: products multiply the bit patterns
        return "TRITON_INTERPRET=1 gives wrong results for bfloat16" if dtype == torch.bfloat16 else None
    if device.type != "cuda":
        return f"the tensors are on '{device.type}', and Triton needs a CUDA device (or TRITON_INTERPRET=1)"
    return _capability_problem(device)


@functools.cache  # parsing takes longer than all other checks of a call
def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _cuda_problem(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Return why our CUDA C++ kernels can't be compiled and run on this device, or None."""
    if device.type != "cuda":
        return f"the tensors are on '{device.type}', and CUDA kernels need a CUDA device"
    from dit_accel.kernels._cuda.runtime import why_not

    return why_not(device) or _capability_problem(device)


def _capability_problem(device: torch.device) -> str | None:
    if torch.version.hip is not None:  # its capabilities are other numbers: gfx90a is (9, 0), as an H100 is
        return "the GPU is AMD's, and the kernels are for NVIDIA's"
    capability = _capability(device)
    if capability < MINIMUM_CAPABILITY:
        return f"the GPU's compute capability is {capability}, and at least {MINIMUM_CAPABILITY} is required"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    return device_properties(device).major, device_properties(device).minor


@functools.cache
def device_properties(device: torch.device):
    return torch.cuda.get_device_properties(device)


_PROBLEMS = {"triton": _triton_problem, "cuda": _cuda_problem}
