"""Stamps of a module: values that change when its weights, adapters, settings or hooks change.

A stamp has the identity, version counter and shape of each weight, and plain attributes such as LoRA scales. Writes
through ``weight.data``, with which peft merges a LoRA, change no version counter, so a stamp also has 16 values of each
weight, and the last row of embeddings, where textual inversion adds tokens.

Weights that are offloaded between calls get new memory, and buffers and quantised data become new tensors. Then
addresses don't count, and buffers and quantised data are compared by their shapes and by up to 4096 values.
"""

import itertools
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from dit_accel.loop.conditioning import PLAIN_TENSORS
from dit_accel.models import component_times
from dit_accel.models.conditions import ADAPTER_SETTINGS
from dit_accel.models.hooks import LIBRARIES, is_known, is_known_class, module_of
from dit_accel.models.stand_in import StandIn
from dit_accel.models.stored_weights import few

QUIET_HOOKS = (component_times.__name__, "transformers.utils.output_capturing")  # torch's hooks that change no output
WRAPPERS = ("accelerate.hooks", "diffusers.hooks.hooks", "torch._dynamo.eval_frame")  # of hooks and compiled code
OFFLOAD_HOOKS = ("diffusers.hooks.group_offloading", "diffusers.hooks.layerwise_casting")  # move weights, no more
PLAIN = frozenset([type(None), bool, int, float, str])  # types of settings
SETTINGS = PLAIN | {FunctionType, BuiltinFunctionType}  # of modules, which may have other code than their classes
TORCHS_OWN = len(vars(nn.Module()))  # first attributes of every module
SAMPLES = 16  # values of each weight
BUFFER_SAMPLES = 4096  # values of each buffer, of quantised data and of the last row of embeddings


class Stamp(NamedTuple):
    """The state of a module: ``key`` is equal for equal states. Hooks may move its weights for each call."""

    key: tuple
    is_offloaded: bool


class _ReadTensors:
    """Tensors of the modules that a stamp has read."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.parts: list[torch.Tensor] = []  # of weights, made anew
        self.quantised: list[torch.Tensor] = []

    def add(self, kind: type[nn.Module], attributes: dict[str, Any], hooks: Sequence[Any]) -> str | None:
        """Add the tensors of a module with these attributes; return why it has no stamp, or None."""
        for group, tensors in ((self.weights, attributes["_parameters"]), (self.buffers, attributes["_buffers"])):
            for name, weight in tensors.items():
                loaded = _offloaded(hooks, name) if weight is not None and weight.is_meta else weight
                if type(loaded) in PLAIN_TENSORS:
                    group.append(loaded)
                    if group is self.weights and issubclass(kind, nn.Embedding) and len(loaded):
                        self.parts.append(loaded[-1])
                elif hasattr(loaded, "device_mesh"):  # all processes must call the encoder together
                    return f"has its {name} on several devices"
                elif loaded is not None:
                    self.quantised.append(loaded)
                    self.parts.extend(_inner(loaded))
                elif weight is not None:
                    return f"has its {name} on device 'meta'"
        return None

    def state(self, *, is_offloaded: bool) -> list[Any]:
        """Return the identities, versions, shapes and some values of all tensors."""
        plain = (*self.weights, *self.buffers)
        counted = (*self.weights, *self.quantised, *(() if is_offloaded else self.buffers))
        state: list[Any] = [item for weight in counted for item in (id(weight), weight._version)]
        state += [] if is_offloaded else [(item.data_ptr(), item.device) for item in plain]
        state += [(item.shape, item.dtype) for item in (*plain, *self.parts)]
        return [*state, _sampled(self.weights, [*self.buffers, *self.parts])]


def read_stamp(module: nn.Module) -> Stamp | str:
    """Return a module's stamp, or why it has none; about 2 ms for T5-XXL, which has 220 weights in 460 modules.

    A stamp keeps no weight alive, and holds no weak references, with which torch can't convert some weights.
    """
    structure: list[Any] = []
    configs: dict[int, Any] = {}
    forwards: dict[type, Any] = {}
    tensors, is_offloaded, pending = _ReadTensors(), False, [module]
    while pending:
        part = pending.pop()
        attributes, kind = vars(part), type(part)
        forwards[kind] = kind.forward
        hooks = _hooks(attributes) if "_hf_hook" in attributes or "_diffusers_hook" in attributes else ()
        if (reason := _why_not(kind, attributes, hooks) or tensors.add(kind, attributes, hooks)) is not None:
            return f"{kind.__name__} {reason}"
        children = attributes["_modules"]
        structure += (kind, *children, *(hook.__code__ for hook in _hooks_with_effect(attributes["_forward_hooks"])))
        settings = itertools.islice(attributes.items(), TORCHS_OWN, None)
        structure += [item for item in settings if type(item[1]) in SETTINGS and item[0][0] != "_"]
        if hooks:
            is_offloaded = True
            structure += [(type(hook), str(getattr(hook, "execution_device", None))) for hook in hooks]
        if "merged_adapters" in attributes:
            structure += [repr(attributes.get(setting)) for setting in ADAPTER_SETTINGS]
        if "config" in attributes:
            configs[id(attributes["config"])] = attributes["config"]
        pending += [child for child in children.values() if child is not None]
    for kind, forward in forwards.items():
        is_alone = not kind.__module__.startswith("torch.distributed.")
        if not (is_alone and is_known_class(kind, LIBRARIES) and is_known(forward, LIBRARIES)):
            return f"{kind.__name__} is not code of a known package"
        structure.append(forward)
    structure += [item for config in configs.values() for item in vars(config).items() if type(item[1]) in PLAIN]
    return Stamp((*structure, *tensors.state(is_offloaded=is_offloaded)), is_offloaded)


def _hooks(attributes: dict[str, Any]) -> list[Any]:
    hook, registry = attributes.get("_hf_hook"), attributes.get("_diffusers_hook")
    hooks = [] if hook is None else [*getattr(hook, "hooks", (hook,))]
    return hooks if registry is None else [*hooks, *registry.hooks.values()]


def _why_not(kind: type[nn.Module], attributes: dict[str, Any], hooks: Sequence[Any]) -> str | None:
    """Return why a module of a class with these attributes may give other outputs for equal inputs, or None."""
    if attributes["training"]:
        return "is in training mode"
    for hook in hooks:
        where = type(hook).__module__
        if where not in OFFLOAD_HOOKS and not where.startswith("accelerate."):
            return f"has a hook {type(hook).__name__}"
    after = _hooks_with_effect(attributes["_forward_hooks"])
    if _hooks_with_effect(attributes["_forward_pre_hooks"]) or not all(map(_reads_arguments_alone, after)):
        return "has a forward hook"
    for forward in (attributes.get("forward"), attributes.get("_old_forward")):
        is_own = forward is None or getattr(forward, "__func__", None) is kind.forward
        if not is_own and not isinstance(forward, StandIn) and module_of(forward) not in WRAPPERS:
            return "has a forward of its own"
    return None


def _hooks_with_effect(hooks: dict[int, Any]) -> list[Any]:
    return [hook for hook in hooks.values() if module_of(hook) not in QUIET_HOOKS]


def _reads_arguments_alone(hook: Any) -> bool:
    """Return True if equal code gives equal outputs, as that of the hook that Qwen-Image 2.1 sets in each call."""
    is_plain = isinstance(hook, FunctionType) and not (hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__)
    return is_plain and not (hook.__code__.co_names or CodeType in map(type, hook.__code__.co_consts))


def _offloaded(hooks: Sequence[Any], name: str) -> torch.Tensor | None:
    """Return a weight that accelerate keeps in host memory between calls; None = it does not, or keeps it on disk."""
    maps = (getattr(hook, "weights_map", None) for hook in hooks)
    return next((weights[name] for weights in maps if isinstance(getattr(weights, "dataset", weights), dict)), None)


def _inner(weight: torch.Tensor) -> Iterator[torch.Tensor]:
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
            group.append(few(weight, SAMPLES if place < len(weights) else BUFFER_SAMPLES))
        read = {}
        for group in groups.values():
            values = torch.cat(group).view(torch.uint8).cpu().numpy().tobytes()
            size, ends = group[0].element_size(), itertools.accumulate((item.numel() for item in group), initial=0)
            read[id(group)] = [values[size * start : size * end] for start, end in itertools.pairwise(ends)]
    return b"".join([read[id(group)][place] for group, place in places])  # in an order that no offload changes
