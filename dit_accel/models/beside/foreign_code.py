"""Code inside a transformer that is not the model's own, and whether its state changes with every call.

Attention processors, hooks on blocks and wrapped forwards may count their calls, or keep tensors from one step for the
next. Forecast steps do not call them, so they would lag behind. Their state is compared before and after each computed
call: attributes, variables of closures and modules, default arguments, and everything that these hold. State that
changes in two computed calls of a branch in a row depends on the step, and every step is computed. After one change,
which may fill a cache, the next step is computed, so that it can decide. A torch hook that returns None and writes into
no tensor only watches, and may lag. Random generators do not count.
"""

import dis
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from operator import is_, length_hint
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.loop.branch import BranchState
from dit_accel.loop.conditioning import version_of
from dit_accel.loop.controller import Controller
from dit_accel.loop.tracker import StepMode
from dit_accel.models import hooks
from dit_accel.models.beside.other_caches import place_of_definition
from dit_accel.models.graphs.state import FOREIGN, HOOKS, NUMBERS, SEQUENCES, TORCHS_OWN
from dit_accel.models.parallel.branches import is_shared

FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
WEIGHTS = (*TORCHS_OWN, "_parameters")
ADDED = ("forward", "processor", "_diffusers_hook", "_hf_hook", *HOOKS)  # attributes that may hold code
PLAIN = (*NUMBERS, torch.Tensor, dict, *SEQUENCES)  # attributes of known objects that code may use for its state
DEPTH = 8  # of objects in one another, from the code on
MOST_VALUES = 10_000  # compared for one piece of code
MOST_BYTES = 4096  # of an array that is compared by value
ELSEWHERE = "code on another device"
COUNTS = (
    "{} keeps state that changes with every call, and forecast steps would not call it; let it depend on the timestep "
    "instead, or pass it to dit_accel.stateless if its calls may be skipped"
)
MAY_COUNT = (
    "{} has only watched so far, but keeps state that changes with every call, and forecast steps do not call it; if "
    "the state decides what it returns, let it depend on the timestep instead, otherwise pass it to dit_accel.stateless"
)


class Watched(NamedTuple):
    """Output of a call, and the change of the state of code inside the transformer: a number, or float32 [1]."""

    output: Any
    change: Any


@dataclass
class Code:
    """One processor, hook, forward or module inside a transformer."""

    name: str
    roots: tuple
    hooks: dict[int, Callable] | None = None  # the dict that holds it, if it is a torch hook
    place: int = 0  # its key there
    acts: bool = True  # False if it is a hook that has only watched so far


class ForeignCode:
    """Finds the code inside a transformer that is not the model's own, and compares its state around computed calls."""

    def __init__(self, transformer: nn.Module) -> None:
        self._transformer = transformer
        self._counting: set[str] = set()  # names of code that kept state in an earlier run
        self.release()

    def release(self) -> None:
        """Drop all references to the transformer's modules, because they may be replaced between runs."""
        self._modules: list[nn.Module] = []
        self._form: list[Any] = []
        self._codes: list[Code] = []
        self._changed: list[Code] = []

    def compare(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the transformer's code, and record which code of others has changed its state in it."""
        self._find()
        if not self._codes:
            return compute(*args, **kwargs)
        is_eager = not any(map(hooks.is_compiled, self._modules))  # a hook that is replaced would be compiled anew
        with ExitStack() as watching:
            for code in self._codes:
                if code.hooks is not None and is_eager:
                    watching.callback(_watch(code))
                elif code.hooks is not None:
                    code.acts = False in _returns(code.hooks[code.place])
            before = self._states()
            output = compute(*args, **kwargs)
        pairs = zip(self._codes, before, self._states(), strict=True)
        self._changed = [code for code, old, new in pairs if len(old) != len(new) or not all(map(_is_same, old, new))]
        return output

    def watch(self, branch: BranchState, compute: Callable[[], Any]) -> Watched:
        """Run a call, and return how :meth:`compare` has found the state changed; a graph's replay runs no code."""
        self._changed = []
        output = compute()
        names = {code.name for code in self._changed if code.acts}
        change: Any = 2.0 if names & branch.changed else float(bool(names))  # 2 = twice in a row
        if is_shared(self._transformer):
            tensor = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
            change = torch.tensor([change], device=tensor.device)  # devices agree on the largest
        return Watched(output, change)

    def settle(self, run: Controller, branch: BranchState, changes: Sequence[float]) -> None:
        """Record the largest change on all devices; compute every later step if the state changes with every call."""
        if not run.may_forecast:
            return
        for code in self._changed:  # hooks that have only watched, but may return something later
            if code.name in branch.changed and not code.acts and len(_returns(code.roots[0])) > 1:
                run.report.note(MAY_COUNT.format(code.name))
        acting = [code.name for code in self._changed if code.acts] or [ELSEWHERE]
        again = [name for name in acting if name in branch.changed] or acting
        branch.changed, branch.unsettled = {code.name for code in self._changed}, max(changes) > 0
        if max(changes) > 1:
            self._counting.update(again)
            others = f", as {len(again) - 1} more like it, " if len(again) > 1 else ""
            has_forecast = any(step.mode == StepMode.DISPATCH.value for step in run.report.steps[:-1])
            which = "rest of the run" if has_forecast else "every step"
            run.compute_all(f"{which} computed: {COUNTS.format(again[0] + others)}")

    @property
    def counts(self) -> bool:
        """Return True if some of the code is known to keep state that changes with every call."""
        if self._counting:
            self._find()
        return any(code.name in self._counting for code in self._codes)

    def _states(self) -> list[list[Any]]:
        """Return the state of each piece of code; a shared object counts for the first, unless this is a torch hook."""
        seen: dict[int, Any] = {}
        return [_state(code.roots, seen if code.hooks is None else {}) for code in self._codes]

    def _find(self) -> None:
        """Look for code, unless modules, hooks, processors and forwards are the same as at the latest look."""
        form = self._form_now() if self._modules else []
        if form and len(form) == len(self._form) and all(map(is_, form, self._form)):
            return
        self._modules = hooks.modules_of(self._transformer)
        self._codes = [*_inside(self._transformer)]
        self._form = self._form_now()

    def _form_now(self) -> list[Any]:
        held = [*map(vars, self._modules)]
        filled = [kept for item in held for key in (*HOOKS, "_modules") if (kept := item[key])]
        filled += [item["_diffusers_hook"].hooks for item in held if "_diffusers_hook" in item]
        replaced = [item.get(key) for item in held for key in ("forward", "processor")]
        classes = {type(module).forward: None for module in self._modules}
        return [*map(len, held), *chain.from_iterable(map(dict.values, filled)), *replaced, *classes]


def _inside(transformer: nn.Module) -> Iterator[Code]:
    """Yield the code inside a transformer that is not the model's own, nor of a known library."""
    own_packages = {*hooks.LIBRARIES, type(transformer).__module__.partition(".")[0]}
    for name, module in transformer.named_modules():
        held, where = vars(module), name or type(transformer).__name__
        has_code = any(map(held.get, ADDED)) or any(issubclass(kind, FUNCTIONS) for kind in {*map(type, held.values())})
        is_own = hooks.is_known_class(type(module), own_packages)
        if name and is_own and not has_code and not _is_foreign(type(module).forward, own_packages):
            continue  # most modules; what follows takes longer
        forward = hooks.own_forward(module)
        if name and not is_own:
            if not hooks.is_stateless(module):
                yield Code(f"module {where} ({type(module).__name__})", (module,))
        elif _is_foreign(forward, own_packages):
            yield Code(f"forward of {where}, {place_of_definition(forward)},", (forward, module))
        for key, value in held.items():
            is_other = isinstance(value, FUNCTIONS) and getattr(value, "__func__", value) is not forward
            if is_other and (name or key != "forward") and _is_foreign(value):
                yield Code(f"{key} of {where}, {place_of_definition(value)},", (value, module))
        if (processor := held.get("processor")) is not None and _is_foreign(processor):
            yield Code(f"attention processor {type(processor).__name__} of {where}", (processor, module))
        for hook in _hooks(module, is_whole=not name):
            if _is_foreign(hook):
                yield Code(f"hook {type(hook).__name__} on {where}", (hook, module))
        for kept in (held[kind] for kind in HOOKS if name):
            for place, hook in kept.items():
                if _is_foreign(hook):
                    yield Code(f"hook {place_of_definition(hook)} on {where}", (hook, module), kept, place, False)


def _hooks(module: nn.Module, *, is_whole: bool) -> list[Any]:
    """Return hooks of diffusers and accelerate on a module; on the whole transformer only hooks beneath ours."""
    registry = vars(module).get("_diffusers_hook")
    order = [] if registry is None else registry._hook_order
    if is_whole:
        order = order[: order.index(hooks.HOOK_NAME)] if hooks.find_hook(module) else []
    found = [registry.hooks[name] for name in order]
    return found if is_whole or "_hf_hook" not in vars(module) else [*found, vars(module)["_hf_hook"]]


def _is_foreign(code: Any, packages: Any = hooks.LIBRARIES) -> bool:
    """Return True if a function, processor or hook is of no known package, and not declared stateless."""
    if code is None or hooks.is_stateless(code):
        return False
    if not isinstance(code, FUNCTIONS):
        call = next((vars(cls)["__call__"] for cls in type(code).__mro__ if "__call__" in vars(cls)), None)
        return not hooks.is_known_class(type(code), packages) or _is_foreign(call, packages)
    if isinstance(code, partial):
        return _is_foreign(code.func, packages)
    if isinstance(code, BuiltinFunctionType):
        return isinstance(code.__self__, (dict, *SEQUENCES))  # such as a list's append
    return not hooks.is_known(code, packages) or _is_foreign(getattr(code, "__wrapped__", None), packages)


def _watch(code: Code) -> Callable[[], None]:
    """Watch a torch hook's calls until the returned function is called."""
    assert code.hooks is not None
    kept, hook = code.hooks, code.hooks[code.place]

    def watched(*args: Any, **kwargs: Any) -> Any:
        tensors = [item for item in pytree.tree_leaves((args[1:], kwargs)) if isinstance(item, torch.Tensor)]
        before = [*map(version_of, tensors)]
        returned = hook(*args, **kwargs)
        code.acts = code.acts or returned is not None or [*map(version_of, tensors)] != before
        return returned

    def stop() -> None:
        if kept.get(code.place) is watched:  # the hook may have removed itself
            kept[code.place] = hook

    kept[code.place] = watched
    return stop


def _returns(hook: Any) -> set[bool]:
    """Return True for a return of None in a hook's code, and False for a return of something else."""
    while isinstance(hook, partial):
        hook = hook.func
    function = inspect.unwrap(hook if isinstance(hook, FUNCTIONS) else type(hook).__call__)
    found, before = set(), None
    for item in dis.get_instructions(function) if hasattr(function, "__code__") else ():
        if item.opname == "RETURN_CONST":  # Python 3.12 and 3.13
            found.add(item.argval is None)
        elif item.opname == "RETURN_VALUE" and before is not None:
            found.add(before.opname == "LOAD_CONST" and before.argval is None)
        before = item
    return found or {False}


def _state(roots: tuple, seen: dict[int, Any]) -> list[Any]:
    """Return values and identities of all that these objects hold, in a fixed order; add the objects to ``seen``."""
    found: list[Any] = []
    waiting = [(root, 0) for root in reversed(roots)]
    while waiting and len(found) < MOST_VALUES:
        item, depth = waiting.pop()
        if item is None or isinstance(item, NUMBERS):
            found.append(item)
        elif id(item) not in seen:
            seen[id(item)] = item
            held = _held(item) if depth < DEPTH else ()
            if held is None:
                found.append(_identity(item))
            else:
                waiting += [(value, depth + 1) for value in reversed(held)]
    return found


def _held(item: Any) -> list[Any] | None:
    """Return values that an object holds; None = only its identity counts."""
    package = type(item).__module__.partition(".")[0]
    if isinstance(item, torch.Tensor):
        is_number = item.is_inference() and item.numel() == 1  # such tensors count no versions
        return [_identity(item), version_of(item), item.item() if is_number else None]
    if package == "numpy" and getattr(item, "nbytes", MOST_BYTES + 1) <= MOST_BYTES:
        return [item.tobytes()]
    if isinstance(item, dict):
        return [len(item), *islice(chain.from_iterable(item.items()), MOST_VALUES)]
    if isinstance(item, SEQUENCES):
        return [len(item), *islice(item, MOST_VALUES)]
    if isinstance(item, FUNCTIONS):
        return _variables(item)
    if isinstance(item, Iterator) and package in ("builtins", "itertools"):
        return [repr(item) if type(item) is count else length_hint(item, 0), *gc.get_referents(item)]
    if isinstance(item, type):
        entries = (vars(cls).values() for cls in item.__mro__ if not _is_library(cls.__module__))
        return [*map(_unbound, chain.from_iterable(entries))]
    if isinstance(item, SimpleNamespace):
        return [*vars(item).values()]
    if _is_library(type(item).__module__):
        if package in (*FOREIGN, "dit_accel") and not isinstance(item, nn.Module):
            return None
        skipped = (*TORCHS_OWN, "_modules", "_parameters", "_buffers") if isinstance(item, nn.Module) else ()
        attributes = getattr(item, "__dict__", {}).items()
        return [value for key, value in attributes if key not in skipped and isinstance(value, PLAIN)]
    # Of no known package: attributes of the object and of its class. Weights may be offloaded.
    is_module = isinstance(item, nn.Module)
    held = {key: value for key, value in getattr(item, "__dict__", {}).items() if not (is_module and key in WEIGHTS)}
    slots = (name for cls in type(item).__mro__ for name in vars(cls).get("__slots__", ()))
    return [*held.values(), *(getattr(item, name, None) for name in slots), type(item)]


def _variables(function: Any) -> list[Any]:
    """Return values that a function reads besides its arguments; of a known function only the one that it wraps."""
    if isinstance(function, partial):
        return [function.func, function.args, function.keywords]
    if not isinstance(function, FunctionType):
        return [getattr(function, "__func__", None), function.__self__]
    held = vars(function)
    if hooks.is_known(function, hooks.LIBRARIES):
        return [held.get("__wrapped__")]
    names = [*dict.fromkeys(_names(function.__code__))]
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [vars(item) for item in named if isinstance(item, ModuleType) and not _is_library(item.__name__)]
    attributes = [module[name] for module in modules for name in names if name in module]
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # an empty cell has none
    return [held, *cells, function.__defaults__, function.__kwdefaults__, *named, *attributes]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _unbound(value: Any) -> Any:
    """Return the function of a method or property in a class; other values unchanged."""
    return getattr(value, "fget", None) if isinstance(value, property) else getattr(value, "__func__", value)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in (*hooks.LIBRARIES, *FOREIGN)


def _identity(item: Any) -> Any:
    """Return something that is the same object as long as this one lives, and keeps it alive only if it must."""
    try:
        return ref(item)
    except TypeError:
        return item


def _is_same(before: Any, after: Any) -> bool:
    return before is after or (type(before) is type(after) and isinstance(after, NUMBERS) and before == after)
