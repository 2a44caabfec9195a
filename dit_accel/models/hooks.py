"""Hooks on a model's modules, compatible with hooks of diffusers and beneath accelerate's offload hook.

``HookRegistry.remove_hook`` of diffusers breaks the chain of hooks if the removed hook is not the last one: the next
hook no longer runs, and when it is removed in turn, the first one comes back. So the chain on a module is repaired
whenever one of our hooks is added or removed, or is called for the first time after a change, by one thread at a time.

``register_hook`` of diffusers also keeps the class's forward of that time. Beneath our hooks a module follows its
class: replacing the forward of the class takes effect at the next call.
"""

import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import HookFunctionReference

from dit_accel.errors import UnsupportedError, shown
from dit_accel.models.wrappers import parameters_of

HOOK_NAME = "dit_accel"
ATTENTION_HOOK = "dit_accel_attention"  # on attention modules, which may also have a hook of another name
ORDER_HOOK = "dit_accel_token_order"  # on the first block, and on modules where tokens enter and leave
LINEAR_HOOK = "dit_accel_linear"  # on linear layers
OFFLOAD_HOOK = "group_offloading"  # diffusers' name
OFFLOAD_HOOKS = (OFFLOAD_HOOK, "layer_execution_tracker")  # on blocks; the second notes their order for streams
SPLIT_HOOK = "ContextParallelSplitHook"  # diffusers' class, which versions before 0.36 lack
CHAINS = threading.RLock()  # held while a chain is changed
FORWARDS = attrgetter("forward", "original_forward")  # of a hook in a chain
KNOWN = ("torch", "diffusers", "accelerate", "peft", "dit_accel")  # packages whose code is trusted
LIBRARIES = frozenset([*KNOWN, "transformers", "torchao", "bitsandbytes", "optimum"])  # their code repeats its results
STATELESS = "dit_accel_stateless"  # attribute of code that was declared stateless

Code = TypeVar("Code")


class Hook(ModelHook):
    """Base of our hooks; a hook belongs to one module and can't be copied or pickled with it."""

    chain: list[Any] | None = None  # of the module, as it was repaired last
    follows_class = False  # True if the module has no forward of its own; set when the hook is added
    runs_eagerly = False  # True = the hook is not compiled, even if its caller is

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Repair a chain that has changed; diffusers calls this before it chooses a forward, even if it is broken."""
        if not torch.compiler.is_compiling() and self.chain != _chain(module):
            mend_chain(module)
        return args, kwargs

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        why = "can't be copied or pickled (torch.save), because hooks of the copy would run the original"
        fix = "call restore_pipeline(pipe) first, then accelerate the original and the copy"
        raise UnsupportedError(f"an accelerated pipeline or transformer {why}: {fix}")


def stateless(code: Code) -> Code:
    """Declare that calls of a hook, attention processor or forward inside a transformer may be skipped, and return it.

    Use it for code whose state changes with every call but does not change the output: a counter for a log, a timer, a
    store of attention maps. Forecast steps do not call the code. A transformer with such a hook around the whole of it
    can also run as a CUDA graph. It also decorates functions, and classes for all their objects.

    Raises:
        UnsupportedError: it takes no attributes, as a list's ``append``.
    """
    try:
        setattr(getattr(code, "__func__", code), STATELESS, True)
    except AttributeError:
        raise UnsupportedError(f"code must take attributes, got {shown(code)}: pass a function that calls it") from None
    return code


def is_stateless(code: Any) -> bool:
    """Return True if code inside a transformer, or its class, was declared stateless."""
    return getattr(code, STATELESS, False) is True


def parameter_names(module: torch.nn.Module) -> list[str]:
    """Names of the parameters of a module's forward, without ``*args`` and ``**kwargs``."""
    return parameters_of(type(module))


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model and all modules in it, level by level, in a third of the time that ``modules()`` takes."""
    found = level = {model: None}
    while level := {child: None for module in level for child in module._modules.values() if child not in found}:
        level.pop(None, None)  # the place of a module that is left out
        found |= level
    return [*found]


def register_hook(module: torch.nn.Module, hook: Hook, name: str = HOOK_NAME) -> None:
    """Add a hook to a module's forward, beneath accelerate's offload hook if there is one."""
    with CHAINS, _beneath_offload(module) if "_old_forward" in vars(module) else nullcontext():
        _put_on_top(module, hook, name)
        hook.follows_class = _is_of_class(module, _bottom(module))


def remove_hook(module: torch.nn.Module, name: str = HOOK_NAME) -> None:
    """Remove our hook of that name and all its traces from a module; do nothing if there is none."""
    if find_hook(module, name) is None:
        return
    registry = module._diffusers_hook
    with CHAINS, _beneath_offload(module):
        mend_chain(module)
        registry.remove_hook(name, recurse=False)
        mend_chain(module)
        if not registry.hooks:
            del module._diffusers_hook
            if _is_of_class(module, module.forward):
                del module.forward


def lift_hook(module: torch.nn.Module, name: str) -> None:
    """Move a hook on a module to the outside of all others on it."""
    registry = module._diffusers_hook
    hook = registry.hooks[name]
    with CHAINS, _beneath_offload(module):
        mend_chain(module)
        registry.remove_hook(name, recurse=False)
        mend_chain(module)
        _put_on_top(module, hook, name)


def hooks_above(module: torch.nn.Module) -> dict[str, Any]:
    """Return the hooks that a call reaches before our hook on the module; none if another thread has removed ours."""
    registry = getattr(module, "_diffusers_hook", None)
    order = [] if registry is None else registry._hook_order
    above = order[order.index(HOOK_NAME) + 1 :] if HOOK_NAME in order else ()
    return {name: registry.hooks.get(name) for name in above}  # None: another thread removes it now


def split_above(module: torch.nn.Module) -> Any:
    """Return the hook that splits a call among ranks before it reaches our hook on the module; None = there is none."""
    return next((hook for hook in hooks_above(module).values() if type(hook).__name__ == SPLIT_HOOK), None)


def lift_others(module: torch.nn.Module, *kinds: str) -> None:
    """Let hooks of these names or classes, which split a call or move weights, run before ours on a module."""
    for kind in kinds:
        for name, hook in [*module._diffusers_hook.hooks.items()]:
            if kind in (name, type(hook).__name__):
                lift_hook(module, name)


def before_splits(model: torch.nn.Module, watch: Callable[[torch.Tensor, int], None]) -> None:
    """Call ``watch(tensor, axis)`` whenever diffusers is about to split a tensor of a call among ranks."""

    def watched(prepare: Callable, x: torch.Tensor, plan: Any) -> torch.Tensor:
        if plan.expected_dims in (None, x.dim()):  # others stay whole
            watch(x, plan.split_dim)
        return prepare(x, plan)

    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in () if registry is None else registry.hooks.values():
            if type(hook).__name__ == SPLIT_HOOK:
                hook._prepare_cp_input = partial(watched, hook._prepare_cp_input)


def find_hook(module: torch.nn.Module, name: str = HOOK_NAME) -> Any:
    """Return our hook of that name on a module, from any acceleration; None = there is none."""
    registry = getattr(module, "_diffusers_hook", None)
    return registry.hooks.get(name) if registry is not None else None


def mend_chain(module: torch.nn.Module) -> None:
    """Let each hook on a module call the next existing one, and the last one the forward that its class has now."""
    with CHAINS:
        registry = getattr(module, "_diffusers_hook", None)
        if registry is None:  # another thread has removed all hooks since the call began
            return
        for name, reference in zip(registry._hook_order, registry._fn_refs, strict=True):
            if (new_forward := getattr(registry.hooks[name], "new_forward", None)) is None:
                reference.forward = _beneath(reference.forward, registry)
                continue
            is_cut = getattr(reference.forward, "func", None) != new_forward
            reference.original_forward = _beneath(reference.forward if is_cut else reference.original_forward, registry)
            if is_cut:
                reference.forward = update_wrapper(partial(new_forward, module), new_forward)
        ours = [hook for hook in registry.hooks.values() if isinstance(hook, Hook)]
        if any(hook.follows_class for hook in ours) and not _is_of_class(module, _bottom(module)):
            reference = registry._fn_refs[0]
            name = "forward" if reference.original_forward is None else "original_forward"
            setattr(reference, name, type(module).forward.__get__(module))
        for hook in ours:
            hook.chain = _chain(module)


def _chain(module: torch.nn.Module) -> list[Any]:
    """Return the order and the forwards of a module's hooks, and its class's forward; empty if it has no hooks."""
    if (registry := vars(module).get("_diffusers_hook")) is None:
        return []
    return [type(module).forward, *registry._hook_order, *map(FORWARDS, registry._fn_refs)]


def _put_on_top(module: torch.nn.Module, hook: Hook, name: str) -> None:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
    # The whole hook: otherwise diffusers' part of it would be compiled, and ours would break the graph.
    if getattr(hook, "runs_eagerly", False):
        whole = module.forward
        module.forward = update_wrapper(partial(torch.compiler.disable(whole.func), *whole.args), whole)
    if len(module._diffusers_hook.hooks) > 1:
        mend_chain(module)
    else:
        hook.chain = _chain(module)


def _beneath(forward: Callable, registry: HookRegistry) -> Callable:
    """Return a forward, or the forward beneath it if it belongs to removed hooks."""
    cells = getattr(inspect.unwrap(getattr(forward, "func", forward)), "__closure__", None) or ()
    for reference in (cell.cell_contents for cell in cells):
        if isinstance(reference, HookFunctionReference) and reference not in registry._fn_refs:
            return _beneath(reference.original_forward or reference.forward, registry)
    return forward


def _bottom(module: torch.nn.Module) -> Callable:
    """Return the forward beneath all hooks of diffusers on a module."""
    held = vars(module)
    registry = held.get("_diffusers_hook")
    if registry is None or not registry._fn_refs:
        return held.get("_old_forward", module.forward)  # "_old_forward" lies beneath accelerate's offload hook
    reference = registry._fn_refs[0]
    return reference.original_forward or reference.forward  # a hook without new_forward has only `forward`


def _is_of_class(module: torch.nn.Module, forward: Callable) -> bool:
    """Return True if a forward is that of the module's class, and was not set on the module itself."""
    return getattr(forward, "__func__", None) is type(module).forward


def own_forward(module: torch.nn.Module) -> Callable:
    """Return the forward beneath all hooks on a module, from its class or set on the module itself."""
    registry = vars(module).get("_diffusers_hook")
    if registry is not None and getattr(registry.hooks.get(HOOK_NAME), "chain", None) != _chain(module):
        mend_chain(module)
    bottom = _bottom(module)
    return getattr(bottom, "__func__", bottom)


def runs_known_code(module: torch.nn.Module) -> bool:
    """Return True if a module runs its class's own forward beneath hooks, and all of it is code of known packages."""
    if not is_known_class(type(module)):
        return False
    forward = type(module).forward
    is_own = _is_of_class(module, _bottom(module))
    return is_own and is_known(forward) and is_known(vars(module).get("forward", forward))


def is_known_class(cls: type, packages: Collection[str] = KNOWN) -> bool:
    return cls.__module__.partition(".")[0] in packages


def is_known(function: Callable, packages: Collection[str] = KNOWN) -> bool:
    return module_of(function).partition(".")[0] in packages


def module_of(function: Callable) -> str:
    """Return the name of a function's module, by its globals; its own name may be that of a wrapped function."""
    while isinstance(function, partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", "")


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if a module was compiled, by ``module.compile()`` or ``torch.compile``."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def why_not_replaceable(module: torch.nn.Module) -> str | None:
    """Return why our hook on a module must call the forward beneath it, such as another cache's, or None."""
    beneath = module._diffusers_hook._hook_order[0]
    if beneath != HOOK_NAME:
        return f"another hook of diffusers lies on the block: {beneath}"
    return None if runs_known_code(module) else "its forward is not diffusers' own"


@contextmanager
def _beneath_offload(module: torch.nn.Module) -> Iterator[None]:
    """Within the block, ``module.forward`` is the forward beneath accelerate's offload hook, which comes and goes."""
    if not hasattr(module, "_old_forward"):
        yield
        return
    offloading, module.forward = module.forward, module._old_forward
    try:
        yield
        module._old_forward = module.forward
    finally:
        module.forward = offloading
