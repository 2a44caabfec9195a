"""Driver of any diffusers transformer: level ``output``, which only needs the model's forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.branch import Call
from dit_accel.loop.memory import ModelSize
from dit_accel.loop.rows import Rows
from dit_accel.models import hooks
from dit_accel.models.beside.compiled import CompiledEntry, compiled_entry
from dit_accel.models.beside.control_net import hook_of
from dit_accel.models.beside.foreign_code import ForeignCode
from dit_accel.models.beside.other_caches import replaced_forward
from dit_accel.models.beside.quantized_linears import LinearHook, QuantizedLinears
from dit_accel.models.conditions import Conditions
from dit_accel.models.families.family import TIMESTEPS, further_latents_of, latents_of, timestep_names
from dit_accel.models.graphs.step_graphs import StepGraphs
from dit_accel.models.parallel.branches import SharedBranches
from dit_accel.presets import Preset

Passed = tuple[tuple, dict[str, Any]]  # a call's arguments and keyword arguments


class TransformerDriver:
    """Drives one transformer from outside: forecasts its output, or runs it and measures the forecast's error."""

    family_name = "any"
    levels: tuple[str, ...] = ("output",)
    token_order: torch.Tensor | None = None  # of the latest call's vision tokens, int64 [S]; None = raster order
    session: Any  # owns the transformer's calls, from :meth:`attach` on

    def __init__(
        self, transformer: torch.nn.Module, preset: Preset, name: str, called: Callable[[], torch.nn.Module]
    ) -> None:
        self.transformer = transformer
        self.preset = preset
        self.works_inside = preset.works_inside
        self.name = name
        self.called = called  # returns the transformer, or its wrapper from torch.compile if the pipeline calls that
        self.net: weakref.ref[torch.nn.Module] | None = None  # the ControlNet that is called before the transformer
        self.compiled: CompiledEntry | None = None  # while attached, where the transformer is compiled whole
        self.parameters = hooks.parameter_names(transformer)
        self.conditions = Conditions(transformer)
        self.foreign = ForeignCode(transformer)
        self.branches = SharedBranches(transformer)
        self.linears: QuantizedLinears | None = None
        self._hooked: list[tuple[torch.nn.Module, str]] = []
        captures = preset.kernels.graphs != "never" and preset.forecast.level == "output"
        self.graphs = StepGraphs(self) if captures else None
        is_replaced = replaced_forward(transformer) is not None  # the new function may not name its arguments
        self.timesteps = timestep_names(self.parameters) or TIMESTEPS
        if not is_replaced and not timestep_names(self.parameters):
            names = f"{', '.join(map(repr, TIMESTEPS))} or timesteps of parts ('vision_timesteps')"
            why = f"takes no {names}, so its steps can't be distinguished; a wrapper must hold one transformer"
            fix = "call accelerate_pipeline before you wrap it, or accelerate_transformer on the transformer inside"
            raise UnsupportedError(f"transformer {type(transformer).__name__} {why}: {fix}")

    def layers(self) -> list[str]:
        """Names of the blocks that the report lists."""
        return [self.name]

    def prepare(self) -> None:
        """Check the preset against the transformer before anything is hooked; raise an error if they do not fit."""
        if self.preset.linear.dtype is not None:
            self.linears = QuantizedLinears(self.transformer, self.preset.linear, self._note, self._free_graphs)

    def attach(self, session: Any, hook: hooks.Hook) -> None:
        """Hook the transformer with the hook that passes its calls to a session."""
        self.session = session
        self.hook(self.transformer, hook)
        self.compiled = compiled_entry(self.transformer, self.called())
        if self.linears is not None:
            for layer in self.linears.all_layers:
                self.hook(layer, LinearHook(self.linears), hooks.LINEAR_HOOK)
            self.linears.attach()

    def inherit(self, earlier: TransformerDriver) -> None:
        """Take over weights that wait on the host from an earlier driver of the same transformer."""
        if earlier.transformer is self.transformer and None not in (self.linears, earlier.linears):
            self.linears.inherit(earlier.linears)

    def _free_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def _note(self, remark: str) -> None:
        self.session.run.report.note(remark)

    def hook(self, module: torch.nn.Module, hook: hooks.Hook, name: str = hooks.HOOK_NAME) -> None:
        """Hook a module until :meth:`detach`."""
        hooks.register_hook(module, hook, name)
        self._hooked.append((module, name))
        if module is not self.transformer and len(module._diffusers_hook.hooks) > 1:
            hooks.lift_others(module, hooks.SPLIT_HOOK)

    @property
    def is_attached(self) -> bool:
        return getattr(getattr(hooks.find_hook(self.transformer), "session", None), "driver", None) is self

    def detach(self) -> None:
        """Undo :meth:`attach`, also on modules that the transformer or the pipeline no longer has."""
        while self._hooked:
            hooks.remove_hook(*self._hooked.pop())
        if self.compiled is not None:
            self.compiled.leave()
        self._free_graphs()
        if self.linears is not None:
            self.linears.detach()

    def release(self) -> None:
        """Free memory of a finished run; rounded weights stay if graphs read them by address."""
        self.conditions.release()
        self.foreign.release()
        if self.net is not None and (hook := hook_of(self.net())) is not None:
            hook.release()
        if self.graphs is not None:
            self.graphs.give_way()
        if self.linears is not None and not self.graphs:  # None, or empty
            self.linears.release()

    def computing(self, forward: Callable) -> Callable:
        """Return the function that computes a call: the forward beneath our hook, or its compiled form."""
        self.compiled = compiled_entry(self.transformer, self.called(), self.compiled)
        return forward if self.compiled is None else partial(self.compiled.compute, forward)

    def account(self, call: Call, arguments: dict[str, Any]) -> None:
        """Fill ``call.work`` and ``call.branch.plain``; here the transformer counts as one block of one unit."""
        call.work[self.name] = call.branch.plain[self.name] = 1.0, 0.0

    def used(self, arguments: dict[str, Any], output: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the part of these samples' output ``[B, …]`` that the pipeline uses; forecasts are compared on it."""
        return output

    def size(self, arguments: dict[str, Any]) -> ModelSize:
        """Size of a call's records; here only outputs, assumed to be as large as the latents."""
        if not (tensors := [*latents_of(arguments), *further_latents_of(arguments)]):
            return ModelSize()
        return ModelSize(output=sum(item.numel() for item in tensors), itemsize=tensors[0].element_size())

    def lengths(self, arguments: dict[str, Any]) -> tuple:
        """Lengths besides shapes on which records of the blocks depend."""
        return ()

    def enter(self, call: Call, passed: Passed, arguments: dict[str, Any]) -> tuple[Passed, dict[str, Any]]:
        """Prepare a call whose blocks run; return its arguments, as they are passed and by name."""
        return passed, arguments

    def why_eager(self) -> str | None:
        """Return why the call in progress can't be captured, or None."""
        if self.foreign.counts:
            return "code inside the transformer keeps state that changes with every call"
        if self.linears is not None and self.linears.is_timing:
            return "linear layers are timed without 8 bits"
        return None if self.compiled is None else "the transformer is compiled"

    def decisions(self) -> tuple:
        """Return host values other than its arguments that decide how the call in progress runs."""
        return ()

    def shared_tensors(self) -> Any:
        """Return tensors on the device that calls share."""
        return None

    def announce(self, symbols: Mapping[str, SparseSymbols], densities: Mapping[str, torch.Tensor]) -> None:
        """Pass symbols and measured densities of the blocks to the call in progress."""
