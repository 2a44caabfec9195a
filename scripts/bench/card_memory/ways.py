"""Ways to keep a transformer in host memory, as pipelines of diffusers enable them, and to undo them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import HookRegistry
from torch import nn

GROUP_HOOKS = ("layer_execution_tracker", "lazy_prefetch_group_offloading", "group_offloading")  # upper hooks first


@contextmanager
def _model(transformer: nn.Module, device: torch.device) -> Iterator[None]:
    """``enable_model_cpu_offload``: the whole transformer moves to the device before its first step."""
    cpu_offload_with_hook(transformer, device)
    try:
        yield
    finally:
        remove_hook_from_module(transformer)


@contextmanager
def _sequential(transformer: nn.Module, device: torch.device) -> Iterator[None]:
    """``enable_sequential_cpu_offload``: each layer moves to the device when it runs."""
    _unpin(transformer)
    cpu_offload(transformer, device, offload_buffers=len(transformer._parameters) > 0)
    try:
        yield
    finally:
        remove_hook_from_module(transformer, recurse=True)


@contextmanager
def _groups(
    transformer: nn.Module, device: torch.device, kind: str, *, stream: bool = True, low_cpu_mem_usage: bool = False
) -> Iterator[None]:
    """``enable_group_offload``: the next block or layer moves while this one runs. A CPU has no streams."""
    if low_cpu_mem_usage:
        _unpin(transformer)
    try:
        transformer.enable_group_offload(
            onload_device=device,
            offload_type=f"{kind}_level",
            num_blocks_per_group=1,
            use_stream=stream and device.type == "cuda",
            low_cpu_mem_usage=low_cpu_mem_usage,
        )
        yield
    finally:
        registry = HookRegistry.check_if_exists_or_initialize(transformer)
        for name in GROUP_HOOKS:
            registry.remove_hook(name, recurse=True)


# Streams pin host memory, which stays pinned until a way unpins it.
WAYS: dict[str, Callable] = {
    "model": _model,
    "block": partial(_groups, kind="block"),
    "leaf": partial(_groups, kind="leaf"),
    "block-no-stream": partial(_groups, kind="block", stream=False),
    "leaf-low-host": partial(_groups, kind="leaf", low_cpu_mem_usage=True),
    "sequential": _sequential,
}
STARTS = ("model",)  # ways that move all weights before the first step of each call


def why_not_together(weights: str, way: str) -> str | None:
    """Return why weights of a form can't be offloaded this way, or None."""
    if way == "sequential" and weights != "bf16":
        return "accelerate moves only plain layers one by one"
    return None


def start(transformer: nn.Module, device: torch.device) -> float:
    """Move all weights to the device, and return the seconds it took."""
    started = time.perf_counter()
    transformer.to(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _unpin(transformer: nn.Module) -> None:
    """Copy pinned weights to memory that is not, as a model that was just loaded has it."""
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        if type(tensor.data) is torch.Tensor and torch.cuda.is_available() and tensor.data.is_pinned():
            tensor.data = tensor.data.clone()
