"""Stamps of a module: values that change when its weights, adapters, settings or hooks change.

A stamp has the identity, version counter and shape of each weight, and plain attributes such as LoRA scales. Writes
through ``weight.data``, with which peft merges a LoRA, change no version counter, so a stamp also has 16 values of each
weight. Weights that are offloaded between calls get new memory, and buffers become new tensors: then addresses don't
count, and buffers are compared by their shape and by up to 4096 values.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from dit_accel.loop.conditioning import PLAIN_TENSORS
from dit_accel.models import component_times
from dit_accel.models.conditions import ADAPTER_SETTINGS
from dit_accel.models.hooks import KNOWN, is_known, is_known_class, module_of

PACKAGES = frozenset([*KNOWN, "transformers", "torchao", "bitsandbytes", "optimum"])  # their code repeats its results
QUIET_HOOKS = (component_times.__name__, "transformers.utils.output_capturing")  # torch's hooks that change no output
WRAPPERS = ("accelerate.hooks", "diffusers.hooks.hooks", "torch._dynamo.eval_frame")  # of hooks and compiled code
OFFLOAD_HOOKS = ("diffusers.hooks.group_offloading", "diffusers.hooks.layerwise_casting")  # move weights, no more
PLAIN = frozenset([type(None), bool, int, float, str])  # types of settings
SETTINGS = PLAIN | {FunctionType, BuiltinFunctionType}  # of modules, which may have other code than their classes
TORCHS_OWN = len(vars(nn.Module()))  # first attributes of every module
SAMPLES = 16  # values of each weight
BUFFER_SAMPLES = 4096  # values of each buffer: whole tables of positions


class Stamp(NamedTuple):
    """The state of a module.

    Attributes:
        key: equal for equal states.
        is_offloaded: True if hooks move weights to the device for each call.
    """

    key: tuple
    is_offloaded: bool


class Stamps:
    """Reads the stamps of one module; it keeps no weight alive."""

    def __init__(self) -> None:
        self._serials: dict[int, tuple[weakref.ref, int]] = {}  # by id of the weight
        self._next = itertools.count()
        self._latest: tuple = ()
        self._lock = threading.Lock()

    def read(self, module: nn.Module) -> Stamp | str:
        """Return the module's stamp, or why it has none; about 2 ms for 700 modules with 500 weights."""
        structure: list[Any] = []
        configs: dict[int, Any] = {}
        weights: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        forwards: dict[type, Any] = {}
        is_offloaded, pending = False, [module]
        while pending:
            part = pending.pop()
            held, kind = vars(part), type(part)
            forwards[kind] = kind.forward
            hooks = _hooks(held) if "_hf_hook" in held or "_diffusers_hook" in held else ()
            if (reason := _why_not(kind, held, hooks)) is not None:
                return f"{kind.__name__} {reason}"
            children = held["_modules"]
            structure.append(kind)
            structure += children
            own = itertools.islice(held.items(), TORCHS_OWN, None)
            structure += [item for item in own if type(item[1]) in SETTINGS and item[0][0] != "_"]
            if hooks:
                is_offloaded = True
                structure += [(type(hook), str(getattr(hook, "execution_device", None))) for hook in hooks]
            if "merged_adapters" in held:
                structure += [repr(held.get(setting)) for setting in ADAPTER_SETTINGS]
            if "config" in held:
                configs[id(held["config"])] = held["config"]
            for group, tensors in ((weights, held["_parameters"]), (buffers, held["_buffers"])):
                for name, weight in tensors.items():
                    found = _offloaded(hooks, name) if weight is not None and weight.is_meta else weight
                    if type(found) in PLAIN_TENSORS:
                        group.append(found)
                    elif found is not None:
                        group.extend(_inner(found))
                    elif weight is not None:
                        return f"{kind.__name__} has its {name} on device 'meta'"
            pending += [child for child in children.values() if child is not None]
        for kind, forward in forwards.items():
            if not (is_known_class(kind, PACKAGES) and is_known(forward, PACKAGES)):
                return f"{kind.__name__} is not code of a known package"
            structure.append(forward)
        for config in configs.values():
            structure += [item for item in vars(config).items() if type(item[1]) in PLAIN]
        with self._lock:
            counted = weights if is_offloaded else [*weights, *buffers]
            addresses = () if is_offloaded else [(each.data_ptr(), each.device) for each in counted]
            shapes = [(each.shape, each.dtype) for each in (*weights, *buffers)]
            key = (*structure, *shapes, *self._versions(counted), *addresses, _sampled(weights, buffers))
            if key == self._latest:
                key = self._latest  # so that keys share memory
            self._latest = key
        return Stamp(key, is_offloaded)

    def _versions(self, weights: list[torch.Tensor]) -> list[int]:
        """Return the identities of weights, as numbers that are used once, and their versions."""
        serials, found = {}, []
        for weight in weights:
            place = id(weight)
            known = serials.get(place) or self._serials.get(place)
            if known is None or known[0]() is not weight:
                known = (weakref.ref(weight), next(self._next))
            serials[place] = known
            found += (known[1], weight._version)
        self._serials = serials
        return found


def _hooks(held: dict[str, Any]) -> list[Any]:
    """Return the hooks of accelerate and diffusers on a module."""
    hook, registry = held.get("_hf_hook"), held.get("_diffusers_hook")
    found = [] if hook is None else [*getattr(hook, "hooks", (hook,))]
    return found if registry is None else [*found, *registry.hooks.values()]


def _why_not(kind: type[nn.Module], held: dict[str, Any], hooks: Sequence[Any]) -> str | None:
    """Return why a module of a class with these attributes may give other outputs for equal inputs, or None."""
    if held["training"]:
        return "is in training mode"
    for hook in hooks:
        where = type(hook).__module__
        if where not in OFFLOAD_HOOKS and not where.startswith("accelerate."):
            return f"has a hook {type(hook).__name__}"
    if not ("forward" in held or held["_forward_hooks"] or held["_forward_pre_hooks"]):
        return None
    for hook in (*held["_forward_hooks"].values(), *held["_forward_pre_hooks"].values()):
        if module_of(hook) not in QUIET_HOOKS:  # also if a pipeline adds it for a call, to read or change a layer
            return "has a forward hook"
    for forward in (held.get("forward"), held.get("_old_forward")):
        is_own = forward is None or getattr(forward, "__func__", None) is kind.forward
        if not is_own and module_of(forward) not in WRAPPERS:
            return "has a forward of its own"
    return None


def _offloaded(hooks: Sequence[Any], name: str) -> torch.Tensor | None:
    """Return a weight that accelerate keeps in host memory between calls; None = it does not, or keeps it on disk."""
    for hook in hooks:
        weights = getattr(hook, "weights_map", None)
        if weights is not None and isinstance(getattr(weights, "dataset", weights), dict):
            return weights[name]
    return None


def _inner(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with the data of a weight, which may be quantised."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:
        yield from _inner(getattr(weight, name))


@torch.no_grad()
def _sampled(weights: list[torch.Tensor], buffers: list[torch.Tensor]) -> bytes:
    """Return some values of each weight and buffer; waits once for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    places = []
    with torch._C.DisableTorchFunctionSubclass():
        for place, weight in enumerate((*weights, *buffers)):
            group = groups.setdefault((weight.device, weight.dtype), [])
            places.append((group, len(group)))
            group.append(_few(weight, SAMPLES if place < len(weights) else BUFFER_SAMPLES))
        read = {}
        for group in groups.values():
            values = torch.cat(group).view(torch.uint8).cpu().numpy().tobytes()
            size, ends = group[0].element_size(), itertools.accumulate((each.numel() for each in group), initial=0)
            read[id(group)] = [values[size * start : size * end] for start, end in itertools.pairwise(ends)]
    return b"".join([read[id(group)][place] for group, place in places])  # in an order that no offload changes


def _few(weight: torch.Tensor, most: int) -> torch.Tensor:
    """Return up to ``most`` values of a weight, a view of shape [values]."""
    size = weight.numel()
    if not weight.is_contiguous():
        few = weight[(0,) * (weight.ndim - 1)][:most]
    else:  # an odd stride visits all columns
        few = weight.as_strided((min(size, most),), (max(size // most - 1, 0) | 1,))
    return few.view(torch.uint8) if weight.element_size() == 1 else few
