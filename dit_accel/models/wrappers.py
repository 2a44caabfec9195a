"""Transformers inside of wrappers, whose forward takes any arguments and passes them on.

``torch.compile``, peft's ``get_peft_model``, quanto's ``QuantizedDiffusersModel``, DDP and classes of users wrap a
transformer. Our hooks are on the transformer inside, where arguments have names, so wrappers may come and go.
"""

import inspect
from functools import cache
from typing import Any

import torch

from dit_accel.models.families.family import LATENTS, timestep_names

PRIORS = ("PriorTransformer",)  # classes that denoise an embedding, by another scheduler than the pipeline's
GATHERED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def unwrapped(component: Any) -> Any:
    """Return the only transformer inside of a wrapper; the component if it is no wrapper or has several or none."""
    if "_orig_mod" not in getattr(component, "__dict__", {}).get("_modules", ()) and not _wraps(type(component)):
        return component
    inside = [path[-1] for path in wrapped(component)]
    inside = [item for item in inside if denoises(type(item))] or inside  # of diffusers, or all that take a timestep
    return inside[0] if len(inside) == 1 else component


def wrapped(component: Any) -> list[tuple[Any, ...]]:
    """Return the path from a component to each transformer inside; the component alone if it is no wrapper."""
    path: tuple[Any, ...] = (component,)
    while (inner := _orig_mod(path[-1])) is not None:
        path += (inner,)
    if not _wraps(type(path[-1])):
        return [path]
    found, pending, seen = [], [path], set()
    while pending:
        path = pending.pop(0)
        if timestep_names(parameters_of(type(path[-1]))):
            found.append(path)
            continue
        held = [*vars(path[-1]).get("_modules", {}).values(), *vars(path[-1]).values()]
        held += [item for group in held if type(group) in (list, tuple) for item in group]
        for part in held:
            if (isinstance(part, torch.nn.Module) or _wraps(type(part))) and id(part) not in seen:
                seen.add(id(part))
                pending.append((*path, part))
    return found


def entry(component: Any, transformer: torch.nn.Module) -> torch.nn.Module | None:
    """Return the transformer, or its wrapper from ``torch.compile``; None = the transformer is not in the component."""
    path = next((path for path in wrapped(component) if path[-1] is transformer), None)
    if path is None:
        return None
    holder = path[-2] if len(path) > 1 else transformer
    return holder if _orig_mod(holder) is transformer else transformer


def why_not_wrapped(component: Any) -> str | None:
    """Return why the transformer inside of a component can't be accelerated in its wrappers, or None."""
    for path in wrapped(component):
        for outer in path[:-1]:
            is_compiled = vars(outer).get("_compiled_call_impl") is not None or _orig_mod(outer) is not None
            if is_compiled and _orig_mod(outer) is not path[-1]:
                around, model = type(_orig_mod(outer) or outer).__name__, type(path[-1]).__name__
                why = f"the wrapper {around} around {model} is compiled, and forecast steps must not run compiled code"
                return f"{why}: compile the {model} inside of the wrapper instead"
    return None


def _orig_mod(component: Any) -> Any:
    return getattr(component, "__dict__", {}).get("_modules", {}).get("_orig_mod")


def parameters_of(cls: type) -> list[str]:
    """Return the parameters of a class's forward by name; if it takes any arguments, those of its base's forward."""
    for item in cls.__mro__:
        if callable(forward := vars(item).get("forward")):
            parameters = list(inspect.signature(forward).parameters.values())[1:]
            if names := [item.name for item in parameters if item.kind not in GATHERED]:
                return names
    return []


@cache
def denoises(cls: type) -> bool:
    """Return True for a class of diffusers' transformers that takes latents and a timestep."""
    of_diffusers = [item for item in cls.__mro__ if item.__module__.startswith("diffusers.models.transformers.")]
    if not of_diffusers or any(item.__name__ in PRIORS for item in of_diffusers):
        return False
    names = parameters_of(cls)
    return bool(timestep_names(names)) and not set(names).isdisjoint(LATENTS)


@cache
def _wraps(cls: type) -> bool:
    """Return True for a class whose forward takes any arguments and names no timestep."""
    forward = getattr(cls, "forward", None)
    if not callable(forward) or cls.__module__.partition(".")[0] in ("diffusers", "transformers"):
        return False
    gathers = any(item.kind in GATHERED for item in inspect.signature(forward).parameters.values())
    return gathers and not timestep_names(parameters_of(cls))
