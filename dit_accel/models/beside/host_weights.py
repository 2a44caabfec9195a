"""Weights of linear layers that wait on the host, wherever the layers are moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from dit_accel.loop.storage import empty_on_host

HOST = torch.device("cpu")
STAY = "The weights of linear layers stay on the host: call pipe.to('cpu') before you use the pipeline"


class HostWeight:
    """Weight of one layer on the host: the data of the parameter, which the layer keeps."""

    def __init__(self, layer: nn.Linear, device: torch.device, moved: Callable[[], None]) -> None:
        self.layer = layer
        self.device = device  # of the rest of the layer, which may move; the weight returns there
        self.moved = moved  # is called before the layer moves to another device

    def keep(self) -> None:
        """Move the weight to the host, where it stays if the layer is moved."""
        vars(self.layer).setdefault("_apply", self._apply)  # `to`, `cuda`, `half` and so on of all parents call it
        self._move(HOST)

    def leave(self, device: torch.device) -> None:
        """Move the weight to a device, unless accelerate moves it now, and leave nothing on the layer."""
        if not hasattr(self.layer, "_hf_hook"):
            self._move(device)
        vars(self.layer).pop("_apply", None)

    def _move(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # under which a call may run: later, the weight may be trained
            # not to pinned memory: allocating that takes longer than the copy, and up to twice the memory
            self.layer.weight.data = self.layer.weight.data.to(device)

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is not self.layer.weight:
                return function(tensor)
            target = function(tensor.new_empty(0))
            if target.device != self.device:
                self.moved()
                self.device = target.device
            return tensor.to(target.dtype)

        return type(self.layer)._apply(self.layer, placed, recurse)


class HostWeights(dict[nn.Module, HostWeight]):
    """Weights of a transformer's layers that wait on the host, by layer."""

    def __init__(self, transformer: nn.Module, layers: Iterable[nn.Linear], moved: Callable[[], None]) -> None:
        super().__init__()
        self._transformer = transformer
        self._layers = [*layers]
        self._moved = moved
        self._needed: set[nn.Module] = set()  # layers whose weights were given back

    def inherit(self, earlier: HostWeights) -> None:
        """Take over weights that wait on the host already; weights that had to return stay on the device."""
        self._needed |= earlier._needed
        for layer in self._layers:
            if (held := earlier.pop(layer, None)) is not None:
                held.moved = self._moved
                self[layer] = held

    def attach(self) -> None:
        """Move weights to the host one by one."""
        chosen = {*self._layers}
        others = (module for module in self._transformer.modules() if module not in chosen)
        around = next((item.device for module in others for item in module.parameters(recurse=False)), HOST)
        new = [layer for layer in self._layers if layer not in self and layer not in self._needed]
        for layer in new:
            device = layer.weight.device
            self[layer] = HostWeight(layer, around if device == HOST else device, self._moved)
        self.collect()
        if new:
            torch.cuda.empty_cache()  # otherwise rounded weights would take parts of their segments

    def collect(self) -> None:
        """Move weights to the host that were replaced since, and adapters on these layers to the layers' device."""
        for layer, held in [*self.items()]:
            if hasattr(layer, "_hf_hook"):  # offloaded since
                self.give_back(layer)
            else:
                held.keep()
        for module in self._transformer.modules() if self else ():
            if (base := self.get(module._modules.get("base_layer"))) is not None:
                module.to(base.device)  # peft puts an adapter on the device of the layer's weight

    def device_of(self, layer: nn.Linear) -> torch.device:
        """Device of a layer, apart from its weight on the host."""
        return (self.get(layer) or layer.weight).device

    def give_back(self, layer: nn.Module) -> bool:
        """Move a layer's weight to the layer's device for good; return True if it was on the host."""
        if layer not in self:
            return False
        self[layer].leave(self[layer].device)
        del self[layer]
        self._needed.add(layer)
        return True

    def give_all_back(self) -> None:
        """Move all weights to the layers' devices; if that fails, they all stay on the host."""
        try:
            for held in self.values():
                held.leave(held.device)
        except BaseException as error:
            for held in self.values():
                held.leave(HOST)
            error.add_note(STAY)
            raise
        finally:
            self.clear()


def uploaded(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a weight on a device; by way of pinned memory (22 GiB/s on one H200, 6 from pageable memory)."""
    if weight.device.type == "cpu" != device.type:
        weight = empty_on_host(weight.shape, weight.dtype).copy_(weight)
    return weight.to(device)
