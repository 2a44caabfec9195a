"""Hooks on a model's modules, beside those of diffusers and beneath accelerate's offload."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from diffusers.hooks import HookRegistry, ModelHook

from dit_accel.errors import UnsupportedError

HOOK_NAME = "dit_accel"
ATTENTION_HOOK = "dit_accel_attention"  # on attention modules, beside the other where that one is a part


class Hook(ModelHook):
    """A hook of ours, which belongs to one module and can't be copied with it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError(
            "an accelerated pipeline or transformer can't be copied, for its hooks would run the original: call "
            "restore_pipeline(pipe) first, then accelerate the original and the copy"
        )


def parameter_names(module: torch.nn.Module) -> list[str]:
    """Names of what a module's forward takes."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def register_hook(module: torch.nn.Module, hook: Hook, name: str = HOOK_NAME) -> None:
    """Adds a hook to a module's forward, beneath accelerate's offload hook if there is one."""
    with _beneath_offload(module):
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)


def remove_hook(module: torch.nn.Module, name: str = HOOK_NAME) -> None:
    """Takes our hook of that name off a module and leaves nothing behind; nothing happens if there is none."""
    if find_hook(module, name) is None:
        return
    registry = module._diffusers_hook
    with _beneath_offload(module):
        registry.remove_hook(name, recurse=False)
        if not registry.hooks:
            del module._diffusers_hook
            if getattr(module.forward, "__func__", None) is type(module).forward:
                del module.forward


def find_hook(module: torch.nn.Module, name: str = HOOK_NAME) -> Any:
    """Our hook of that name on a module, whoever put it there; None = there is none."""
    registry = getattr(module, "_diffusers_hook", None)
    return registry.hooks.get(name) if registry is not None else None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled, in either way in which PyTorch does it."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def why_not_replaceable(module: torch.nn.Module) -> str | None:
    """Why our hook on a module must call what lies beneath it, or None: another hook (group offload, a cache) does."""
    beneath = module._diffusers_hook._hook_order[0]
    return None if beneath == HOOK_NAME else f"another hook of diffusers lies on the block: {beneath}"


@contextmanager
def _beneath_offload(module: torch.nn.Module) -> Iterator[None]:
    """Within, ``module.forward`` is what accelerate's offload hook wraps.

    diffusers takes offload hooks off and puts them on again at the end of every pipeline call, which would lose a hook
    on top of them.
    """
    if not hasattr(module, "_old_forward"):
        yield
        return
    offloading, module.forward = module.forward, module._old_forward
    try:
        yield
        module._old_forward = module.forward
    finally:
        module.forward = offloading
