"""What the blocks of every family share: when a hook stands in for a block, and features that are forecast whole.

A family derives a hook per block class and says in :meth:`BlockHook.compute` how the block computes around its
attention site, in :meth:`BlockHook.forecast` how it runs on remembered features, and in :meth:`BlockHook.why_dense`
when its attention must be left to diffusers.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import nn

from dit_accel.adapters.generic import why_not_replaceable
from dit_accel.adapters.sparse_site import SparseSite, why_not_sliceable
from dit_accel.controller import Controller
from dit_accel.schedule import StepMode

_GATHERED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class BlockHook(ModelHook, ABC):
    """Stands in for a block's forward in calls that record, forecast or skip; in all others the block's own runs.

    Args:
        controller: has the call in progress.
        name: the block's name in the report.
    """

    def __init__(self, controller: Controller, name: str) -> None:
        super().__init__()
        self.controller = controller
        self.name = name

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self._signature = inspect.signature(type(module).forward)
        return module

    # What a family says of its block. Arguments come by the names of the block's own forward.

    @abstractmethod
    def compute(self, block: nn.Module, **arguments: Any) -> Any:
        """The block's output, with attention by :meth:`site` where :attr:`attends`; remembers whole features."""

    @abstractmethod
    def forecast(self, block: nn.Module, **arguments: Any) -> Any:
        """The block's output from recalled features; modulation and gates are fresh."""

    @abstractmethod
    def why_dense(self, block: nn.Module, **arguments: Any) -> str | None:
        """Why the block's attention must be left to its own processor now, or None."""

    @abstractmethod
    def sliced(self, block: nn.Module) -> list[nn.Module]:
        """Projections whose weights GEMM-Q and GEMM-O read without calling the module."""

    # What all families share.

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, as the call in progress wants it."""
        call, scope = self.controller.call, self.controller.preset.forecast.scope
        if call is None or not self.stands_in():
            return self.fn_ref.original_forward(*args, **kwargs)
        arguments = self._bind(module, args, kwargs)
        reason = why_not_replaceable(module)
        forecasts_whole = reason is None and scope == "layer"  # whatever runs its attention
        if reason is None and self.attends:
            reason = self._why_dense(module, arguments)
        if reason is not None:
            call.dense.add(self.name)
            self.controller.fall_back(self.name, reason)
            if not forecasts_whole:
                return self.fn_ref.original_forward(*args, **kwargs)
        whole_layer = scope == "layer" or call.site(self.name).degraded
        if call.mode is StepMode.DISPATCH and whole_layer:
            return self.forecast(module, **arguments)
        return self.compute(module, **arguments)

    def stands_in(self) -> bool:
        """Whether the call in progress needs more of the block than its own forward."""
        call = self.controller.call
        records = call.records and self.controller.preset.forecast.scope != "stack"  # there blocks remember nothing
        return records or call.skips or call.mode is StepMode.DISPATCH

    @property
    def attends(self) -> bool:
        """Whether the block's attention runs through :meth:`site` in this call, and not through its processor."""
        call = self.controller.call
        return (self.controller.preset.forecast.scope == "head" or call.skips) and self.name not in call.dense

    def remember(self, feature: str, value: tuple[torch.Tensor, ...], *, by_row: bool = False) -> None:
        """Records a whole feature if a later DISPATCH step may forecast it, ``by_row`` also some rows of it."""
        call, preset = self.controller.call, self.controller.preset
        whole = preset.forecast.scope == "layer" or preset.reuse.degrade_below > 0
        if call.records and (whole or (by_row and preset.forecast.scope == "head")):
            call.history(self.name, feature).record(call.coordinate, value)

    def recall(self, feature: str) -> tuple[torch.Tensor, ...]:
        """The forecast of a whole feature."""
        call = self.controller.call
        return self.controller.forecast(call.site(self.name).features[feature], call.coordinate, call.branch.order)

    def site(self) -> SparseSite:
        """The block's attention site in this call."""
        return SparseSite(self.name, self.controller.call, self.controller.preset)

    def _bind(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults included; what the block gathers in ``*args`` and ``**kwargs`` it ignores."""
        bound = self._signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        named = [name for name, kind in self._signature.parameters.items() if kind.kind not in _GATHERED]
        return {name: bound.arguments[name] for name in named[1:]}

    def _why_dense(self, module: nn.Module, arguments: dict[str, Any]) -> str | None:
        """Why the site can't run sparsely now, or None."""
        call, device = self.controller.call, arguments["hidden_states"].device
        if torch.is_autocast_enabled(device.type):  # it casts what modules get, and sites call no modules
            return "autocast"
        if (reason := self.why_dense(module, **arguments)) is not None:
            return reason
        if self.controller.preset.forecast.scope != "head":
            return None
        reasons = (why_not_sliceable(projection, device) for projection in self.sliced(module))
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None and call.mode is StepMode.DISPATCH and call.site(self.name).symbols is None:
            reason = "no symbols: the block could not run sparsely at the latest UPDATE"
        return reason
