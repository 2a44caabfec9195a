"""Which implementation of an op runs: ``auto`` picks by device, an explicit choice runs or raises."""

from __future__ import annotations

import os

import torch

from dit_accel.errors import BackendError

BACKENDS = ("reference", "triton")
MINIMUM_TRITON = (3, 6)
MINIMUM_CAPABILITY = (8, 0)  # bf16 matrix units and asynchronous copies


def resolve_backend(backend: str, tensor: torch.Tensor) -> str:
    """The backend that runs an op on ``tensor``.

    Args:
        backend: "auto" ("triton" for CUDA tensors where it can run, else "reference"), "reference" or "triton".
        tensor: the op's main argument; its device decides.

    Raises:
        BackendError: ``backend`` is unknown, or can't run on the tensor's device.
    """
    if backend == "auto":
        runs = tensor.is_cuda and _triton_problem(tensor.device, tensor.dtype) is None
        backend = "triton" if runs else "reference"
    if backend not in BACKENDS:
        raise BackendError(f"backend must be 'auto' or one of {BACKENDS}, got {backend!r}")
    if backend == "triton":
        problem = _triton_problem(tensor.device, tensor.dtype)
        if problem:
            raise BackendError(f"backend 'triton' can't run here: {problem}; use backend='reference'")
    return backend


def backend_status() -> dict[str, str]:
    """For each backend "ok", or the reason why it can't run on this machine. Never raises."""
    try:
        problem = _triton_problem(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except Exception as error:  # a broken driver or installation is a status to report, whatever it raises
        problem = f"{type(error).__name__}: {error}"
    return {"reference": "ok", "triton": problem or "ok"}


def _triton_problem(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why Triton kernels can't run on tensors of this device and dtype, or None."""
    try:
        import triton
    except ImportError as error:
        return f"triton can't be imported ({error})"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < MINIMUM_TRITON:
        return f"triton is {triton.__version__}, and the kernels need {'.'.join(map(str, MINIMUM_TRITON))} or later"
    if os.environ.get("TRITON_INTERPRET") == "1":
        # triton 3.6 keeps bfloat16 as uint16 there: products multiply the bit patterns
        return "TRITON_INTERPRET=1 gives wrong results for bfloat16" if dtype == torch.bfloat16 else None
    if device.type != "cuda":
        return f"the tensors are on '{device.type}', and Triton needs a CUDA device (or TRITON_INTERPRET=1)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        return f"the GPU's compute capability is {capability}, and at least {MINIMUM_CAPABILITY} is required"
    return None
