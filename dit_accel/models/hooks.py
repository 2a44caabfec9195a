"""Hooks on a model's modules, beside those of diffusers and beneath accelerate's offload.

``HookRegistry.remove_hook`` of diffusers cuts a chain. Where the hook that it takes out is not the last, the next one
gets what that hook called as its ``forward``, in the place of its own ``new_forward``, and keeps the hook taken out as
its ``original_forward``. So the next one no longer runs, and when it is taken out in turn, the first is back. The chain
on a module is mended whenever a hook of ours on it is put on, taken off or called.

``register_hook`` of diffusers also keeps the forward that a class had at the time. Beneath a hook of ours a module
follows its class: a forward that is put on the class, or taken off it, takes effect at the next call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any, NoReturn

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import HookFunctionReference

from dit_accel.errors import UnsupportedError

HOOK_NAME = "dit_accel"
ATTENTION_HOOK = "dit_accel_attention"  # on attention modules, beside the other where that one is a part
ORDER_HOOK = "dit_accel_token_order"  # likewise on the first block, and where tokens enter and leave
LINEAR_HOOK = "dit_accel_linear"  # likewise on linear layers
SPLIT_HOOK = "ContextParallelSplitHook"  # diffusers' class, which versions before 0.36 lack
GATHERED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
KNOWN = ("torch", "diffusers", "accelerate", "peft", "dit_accel")  # packages whose code does what it is known to do


class Hook(ModelHook):
    """A hook of ours, which belongs to one module and can't be copied or pickled with it."""

    follows_class = False  # whether the module has no forward of its own; known once the hook is on it
    runs_eagerly = False  # also where what calls it is being compiled

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Mends the chain; diffusers calls this before it reads which forward to call, even if the hook is cut off."""
        if not torch.compiler.is_compiling():
            mend_chain(module)
        return args, kwargs

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "an accelerated pipeline or transformer can't be copied or pickled (torch.save), for its hooks would run "
            "the original: call restore_pipeline(pipe) first, then accelerate the original and the copy"
        )


def parameter_names(module: torch.nn.Module) -> list[str]:
    """Names of what a module's forward takes, without ``*args`` and ``**kwargs``."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [each.name for each in parameters if each.kind not in GATHERED]


def register_hook(module: torch.nn.Module, hook: Hook, name: str = HOOK_NAME) -> None:
    """Adds a hook to a module's forward, beneath accelerate's offload hook if there is one."""
    with _beneath_offload(module):
        _put_on_top(module, hook, name)
        hook.follows_class = _is_of_class(module, _bottom(module))


def remove_hook(module: torch.nn.Module, name: str = HOOK_NAME) -> None:
    """Takes our hook of that name off a module and leaves nothing behind; nothing happens if there is none."""
    if find_hook(module, name) is None:
        return
    registry = module._diffusers_hook
    with _beneath_offload(module):
        mend_chain(module)
        registry.remove_hook(name, recurse=False)
        mend_chain(module)
        if not registry.hooks:
            del module._diffusers_hook
            if _is_of_class(module, module.forward):
                del module.forward


def lift_hook(module: torch.nn.Module, name: str) -> None:
    """Puts a hook that is on a module outside of all others on it."""
    registry = module._diffusers_hook
    hook = registry.hooks[name]
    with _beneath_offload(module):
        mend_chain(module)
        registry.remove_hook(name, recurse=False)
        mend_chain(module)
        _put_on_top(module, hook, name)


def split_above(module: torch.nn.Module) -> Any:
    """The hook that splits a call among ranks before it reaches our hook on that module; None = there is none."""
    registry = module._diffusers_hook
    above = registry._hook_order[registry._hook_order.index(HOOK_NAME) + 1 :]
    return next((registry.hooks[name] for name in above if type(registry.hooks[name]).__name__ == SPLIT_HOOK), None)


def lift_split(module: torch.nn.Module) -> None:
    """Has a call be split among ranks before it reaches our hook on a module, which stands in for its forward."""
    registry = module._diffusers_hook
    for name in [name for name, hook in registry.hooks.items() if type(hook).__name__ == SPLIT_HOOK]:
        lift_hook(module, name)


def find_hook(module: torch.nn.Module, name: str = HOOK_NAME) -> Any:
    """Our hook of that name on a module, whoever put it there; None = there is none."""
    registry = getattr(module, "_diffusers_hook", None)
    return registry.hooks.get(name) if registry is not None else None


def mend_chain(module: torch.nn.Module) -> None:
    """Makes every hook on a module run and call the next one that is still there, and the last one call the forward
    that the module's class has now.
    """
    registry = module._diffusers_hook
    for name, reference in zip(registry._hook_order, registry._fn_refs, strict=True):
        own = getattr(registry.hooks[name], "new_forward", None)
        if own is None:
            reference.forward = _beneath(reference.forward, registry)
            continue
        is_cut = getattr(reference.forward, "func", None) != own
        reference.original_forward = _beneath(reference.forward if is_cut else reference.original_forward, registry)
        if is_cut:
            reference.forward = update_wrapper(partial(own, module), own)
    follows_class = any(isinstance(hook, Hook) and hook.follows_class for hook in registry.hooks.values())
    if follows_class and not _is_of_class(module, _bottom(module)):
        reference = registry._fn_refs[0]
        name = "forward" if reference.original_forward is None else "original_forward"
        setattr(reference, name, type(module).forward.__get__(module))


def _put_on_top(module: torch.nn.Module, hook: Hook, name: str) -> None:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
    # All of it: diffusers' own part of a hook would else be compiled, and ours break its graph.
    if getattr(hook, "runs_eagerly", False):
        whole = module.forward
        module.forward = update_wrapper(partial(torch.compiler.disable(whole.func), *whole.args), whole)
    mend_chain(module)


def _beneath(forward: Callable, registry: HookRegistry) -> Callable:
    """A forward itself, or what lies beneath it if it is that of hooks that were taken out."""
    function = inspect.unwrap(getattr(forward, "func", forward))
    cells = getattr(function, "__closure__", None) or ()
    for reference in (cell.cell_contents for cell in cells):
        if isinstance(reference, HookFunctionReference) and reference not in registry._fn_refs:
            return _beneath(reference.original_forward or reference.forward, registry)
    return forward


def _bottom(module: torch.nn.Module) -> Callable:
    """The forward beneath all hooks of diffusers on a module."""
    held = vars(module)
    registry = held.get("_diffusers_hook")
    if registry is None or not registry._fn_refs:
        return held.get("_old_forward", module.forward)  # the former beneath accelerate's offload hook
    reference = registry._fn_refs[0]
    return reference.original_forward or reference.forward  # a hook without a new_forward has the latter alone


def _is_of_class(module: torch.nn.Module, forward: Callable) -> bool:
    """Return True if a forward is the one of the module's class, and not one of the module's own."""
    return getattr(forward, "__func__", None) is type(module).forward


def own_forward(module: torch.nn.Module) -> Callable:
    """The function that runs beneath all hooks on a module: its class's, or one that was set on the module itself."""
    if "_diffusers_hook" in vars(module):
        mend_chain(module)
    bottom = _bottom(module)
    return getattr(bottom, "__func__", bottom)


def runs_known_code(module: torch.nn.Module) -> bool:
    """Whether a module runs its class's own forward, beneath hooks, and all of that is code of known packages."""
    if not is_known_class(type(module)):
        return False
    own = type(module).forward
    return _is_of_class(module, _bottom(module)) and is_known(own) and is_known(vars(module).get("forward", own))


def is_known_class(cls: type) -> bool:
    """Whether a class is defined in a known package."""
    return cls.__module__.partition(".")[0] in KNOWN


def is_known(function: Callable) -> bool:
    """Whether a function is code of a known package. Its globals tell; its name is that of what it wraps."""
    while isinstance(function, partial):
        function = function.func
    scope = getattr(getattr(function, "__func__", function), "__globals__", {})
    return scope.get("__name__", "").partition(".")[0] in KNOWN


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled, in either way in which PyTorch does it."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def why_not_replaceable(module: torch.nn.Module) -> str | None:
    """Why our hook on a module must call what lies beneath it, or None: another hook (group offload, a cache) does."""
    beneath = module._diffusers_hook._hook_order[0]
    if beneath != HOOK_NAME:
        return f"another hook of diffusers lies on the block: {beneath}"
    return None if runs_known_code(module) else "its forward is not diffusers' own"


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
