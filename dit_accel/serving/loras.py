"""Load LoRAs into a pipeline: fused into its weights, or by name, so that each job has its own."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from dit_accel.errors import ArgumentError, shown
from dit_accel.models import denoisers
from dit_accel.serving.failures import explained_loading
from dit_accel.tools.files import repository_and_file

MOST_BYTES = 2**31  # of named LoRAs that stay on the device


def load_loras(pipe: Any, loras: Mapping[str, float]) -> None:
    """Fuse LoRAs into a pipeline's weights. With quantised weights, which can't be fused, they stay separate layers."""
    if not loras:
        return
    names = [f"lora-{index}" for index in range(len(loras))]
    for name, source in zip(names, loras, strict=True):
        _load(pipe, "lora", source, name)
    pipe.set_adapters(names, list(loras.values()))
    for transformer in denoisers(pipe).values():
        if hasattr(transformer, "peft_config") and getattr(transformer, "hf_quantizer", None) is None:
            transformer.fuse_lora()
            transformer.unload_lora()


def require_named(weights: Mapping[str, Any], known: Collection[str]) -> None:
    for name, weight in weights.items():
        if name not in known or type(weight) not in (int, float) or not math.isfinite(weight):
            names = ", ".join(sorted(known)) or "none; start with --loras"
            raise ArgumentError("loras", f"must have finite weights of LoRAs ({names}), got {shown({name: weight})}")


class NamedLoras:
    """LoRAs that jobs choose by name. They load at their first use; beyond ``MOST_BYTES`` the least used leave."""

    def __init__(self, pipe: Any, sources: Mapping[str, str]) -> None:
        self._pipe, self._sources = pipe, sources
        self._bytes: dict[str, int] = {}  # of loaded ones, least recently used first

    def use(self, weights: Mapping[str, float]) -> None:
        """Activate these LoRAs with their weights, and no others; without any the pipeline is the plain one."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for name in weights:
            if name not in self._bytes:
                _load(self._pipe, "loras", self._sources[name], name)
            self._bytes[name] = self._bytes.pop(name, 0) or _bytes(self._pipe, name)
        for name in [name for name in self._bytes if name not in weights]:
            if sum(self._bytes.values()) > MOST_BYTES:
                self._pipe.delete_adapters(name)
                del self._bytes[name]
        for layer in (layer for part in _parts(self._pipe) for layer in part.modules()):
            if isinstance(layer, BaseTunerLayer):
                layer.enable_adapters(bool(weights))
        if weights:
            self._pipe.set_adapters([*weights], [*weights.values()])


def _parts(pipe: Any) -> list[Any]:
    return [part for part in pipe.components.values() if hasattr(part, "named_parameters")]


def _bytes(pipe: Any, adapter: str) -> int:
    weights = (item for part in _parts(pipe) for item in part.named_parameters())
    return sum(weight.nbytes for name, weight in weights if f".{adapter}." in name)


def _load(pipe: Any, field: str, source: str, adapter: str) -> None:
    if not hasattr(pipe, "load_lora_weights"):
        raise ArgumentError(field, f"{type(pipe).__name__} takes no LoRA")
    place, file = repository_and_file(source)
    with explained_loading(field, source):
        pipe.load_lora_weights(place, adapter_name=adapter, weight_name=file)
