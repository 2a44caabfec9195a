"""The `cute` backend: attention by the package flash-attn-4 (CuTe DSL) on Hopper, an extra of this one."""

from __future__ import annotations

import functools
from importlib import metadata

import torch

VERSION = "4.0.0b36"  # what the launcher was written and measured for; its functions are not a stable interface
CAPABILITY = (9, 0)
INSTALL = "pip install 'dit-accel[hopper]'"


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why flash-attn-4 can't run on tensors of this device, or None. Imports it only where it is right for the GPU.

    Elsewhere than on compute capability 9.0 it won't do: up to 8.9 it ignores block sparsity without a word, and from
    10.0 on its rows have 256 tokens, which a plan's blocks have not.
    """
    try:
        installed = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return f"flash-attn-4 is not installed; {INSTALL}"
    if installed != VERSION:
        return f"flash-attn-4 is {installed}, and {VERSION} is required; {INSTALL}"
    if device.type != "cuda":
        return f"the tensors are on '{device.type}', and flash-attn-4 needs a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return f"it needs a GPU of compute capability {CAPABILITY} (H100, H200), got {capability}"
    try:
        import flash_attn.cute.interface  # noqa: F401
    except Exception as error:  # whatever a broken installation raises is the reason
        return f"flash-attn-4 can't be imported ({type(error).__name__}: {error}); {INSTALL}"
    return None
