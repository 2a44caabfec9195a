"""Ways to keep a transformer in host memory, as pipelines of diffusers enable them, and to undo them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from accelerate import cpu_offload_with_hook
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
def _groups(transformer: nn.Module, device: torch.device, kind: str) -> Iterator[None]:
    """``enable_group_offload``: the next block or layer moves while this one runs. A CPU has no streams."""
    try:
        transformer.enable_group_offload(
            onload_device=device, offload_type=f"{kind}_level", num_blocks_per_group=1, use_stream=device.type == "cuda"
        )
        yield
    finally:
        stop_group_offload(transformer)


def stop_group_offload(module: nn.Module) -> None:
    """Remove the hooks of ``enable_group_offload``; the weights stay where they are."""
    registry = HookRegistry.check_if_exists_or_initialize(module)
    for name in GROUP_HOOKS:
        registry.remove_hook(name, recurse=True)


WAYS: dict[str, Callable] = {
    "model": _model,
    "block": partial(_groups, kind="block"),
    "leaf": partial(_groups, kind="leaf"),
    "linear": lambda transformer, device: nullcontext(transformer.to(device)),
}
