"""Conditions of a transformer call: everything except its latents and its timestep that changes the output.

They are the other arguments of the call, the pipeline's guidance scales, and the active adapters with their strengths.
:mod:`dit_accel.loop.conditioning` notices when one of them changes.
"""

import re
from collections.abc import Collection
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.loop.conditioning import PLAIN_TENSORS, VERSION, version_of
from dit_accel.models.beside.control_net import NUMBERS, hook_of
from dit_accel.models.families.family import FURTHER_LATENTS, LATENTS
from dit_accel.models.hooks import modules_of

TIMES = ("timestep", "timesteps", "t", "timestep_r", "r_timestep", "audio_timestep", "sigma", "audio_sigma")
TIMES += ("timestep_indices",)  # of each token among the timesteps
LATENTS_AND_TIME = frozenset([*LATENTS, *FURTHER_LATENTS, *TIMES])  # arguments that differ at every step
SCALE = re.compile("scale|guidance")  # in names of a pipeline's attributes that hold the strength of guidance
ADAPTER_SETTINGS = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")  # of layers of peft


class Conditions:
    """Reads the conditions of one transformer's calls."""

    def __init__(self, transformer: nn.Module) -> None:
        self._transformer = transformer
        self.release()

    def release(self) -> None:
        """Drop all references to the transformer's modules, because they may be replaced between runs."""
        self._loaded: tuple | None = None
        self._adapted: list[dict[str, Any]] = []  # attributes of layers with adapters
        self._attentions: list[nn.Module] = []
        # dicts of modules' weights, and keys
        self._places: tuple[list[dict[str, nn.Parameter | None]], list[str]] = [], []
        self._held: list[nn.Parameter | None] = []  # the weights at the latest call
        self._identities: tuple[int, ...] = ()
        self._counting: list[nn.Parameter] = []  # weights that have version counters
        self.weights: dict[str, tuple] = {}  # keys of adapters and weights at the latest call

    def of(self, arguments: dict[str, Any], pipeline: Any, net: nn.Module | None) -> dict[str, Any]:
        items = leaves(arguments, LATENTS_AND_TIME)
        for owner in (pipeline, getattr(pipeline, "guider", None)):
            for name, value in getattr(owner, "__dict__", {}).items():
                if type(value) in NUMBERS and SCALE.search(name):
                    items[f"{name.lstrip('_')} of {type(owner).__name__}"] = value
        if net is not None and (hook := hook_of(net)) is not None:
            of_net = leaves(hook.arguments, LATENTS_AND_TIME | arguments.keys())
            items |= {f"{name} of the ControlNet": leaf for name, leaf in of_net.items()}
        return items | self.read_weights()

    def read_weights(self) -> dict[str, tuple]:
        """Return keys of adapters and weights: the same objects, in the same dict, until one of them changes."""
        loaded = self._find_modules()
        adapters = [_frozen(item.get(setting)) for item in self._adapted for setting in ADAPTER_SETTINGS]
        processors = map(attrgetter("processor"), self._attentions)  # no Python call for each
        adapters += [(id(item), _frozen(item.scale)) for item in processors if hasattr(item, "scale")]
        # A key that changes when a weight is written or replaced; 0.1 ms for FLUX's 780 weights.
        if len(self._held) != len(self._places[0]) or not all(map(is_, map(dict.get, *self._places), self._held)):
            self._held = [*map(dict.get, *self._places)]
            self._identities = tuple(map(id, self._held))
            self._counting = [weight for weight in self._held if weight is not None and not weight.is_inference()]
        versions = self._identities, sum(map(VERSION, self._counting))
        for name, key in ("adapters", (loaded, *adapters)), ("weights", versions):
            if key != self.weights.get(name):
                self.weights = self.weights | {name: key}
        return self.weights

    def _find_modules(self) -> tuple:
        """Return the names of the loaded adapters; if they are new, look for the modules that hold weights."""
        held = vars(self._transformer)
        loaded = (*held.get("peft_config", ()), id(self._transformer._modules.get("encoder_hid_proj")))
        if loaded != self._loaded:
            self._loaded = loaded
            modules = modules_of(self._transformer)
            self._adapted = [item for item in map(vars, modules) if "merged_adapters" in item]
            self._attentions = [item for item in modules if "processor" in vars(item) or "processor" in item._modules]
            # Offloaded weights are on device meta between calls, and new tensors in each call.
            places = [
                (item["_parameters"], name)
                for item in map(vars, modules)
                if item["_parameters"] and not _is_offloaded(item.get("_hf_hook"))
                for name, weight in item["_parameters"].items()
                if weight is not None and not weight.is_meta
            ]
            self._places = [item for item, _ in places], [name for _, name in places]
        return loaded


def _is_offloaded(hook: Any) -> bool:
    """Return True if accelerate's hook moves a module's weights to the device for each call, as new tensors."""
    return any(getattr(item, "offload", False) for item in getattr(hook, "hooks", (hook,)))


def _frozen(setting: Any) -> Any:
    """Return a snapshot of a setting, which may change in place; peft's strengths are tensors if it hot-swaps."""
    if isinstance(setting, dict):
        setting = [*setting, *setting.values()]
    if isinstance(setting, (list, tuple)):  # in each of hundreds of layers, mostly one name and one number
        return tuple([item if type(item) in (str, float) else _frozen(item) for item in setting])
    return (id(setting), version_of(setting)) if type(setting) in PLAIN_TENSORS else setting


def leaves(arguments: dict[str, Any], without: Collection[str]) -> dict[str, Any]:
    """Return each argument, or each leaf of a nested one, by name; skip the names in ``without``."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in without:
            continue
        if value is None or isinstance(value, (torch.Tensor, *NUMBERS)):
            found[name] = value
        elif type(value) is not dict or value:  # most pipelines pass an empty dict for attention
            found |= {f"{name}[{place}]": leaf for place, leaf in enumerate(pytree.tree_leaves(value))}
    return found
