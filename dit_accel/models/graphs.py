"""CUDA graphs of computed steps: what a step asks of the GPU is recorded once, and asked for again at one stroke.

Where kernels are short, Python takes longer to launch them than the GPU to run them. A computed step at level
``output`` decides nothing on the host and has fixed shapes. So the first of its kind runs as ever (kernels compile,
caches fill), the second is watched, the third is captured, and from then on inputs are copied in, the graph is replayed
and outputs are copied out. When to compute, forecasts and what a step measured stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.branch import Call
from dit_accel.loop.controller import Controller
from dit_accel.models.context_parallel import parallel_degree
from dit_accel.models.cuda_graph import CudaGraph, Trial
from dit_accel.models.graph_limits import (
    model_state,
    why_not_call,
    why_not_known,
    why_not_model,
    why_not_output,
    why_not_preset,
)

MOST_GRAPHS = 8  # kept at a time: two branches, dense and with tiles left out, and as many once more
REFUSED = "computed steps not captured as CUDA graphs"


class Driver(Protocol):
    """What graphs need of the driver of a transformer."""

    transformer: nn.Module
    controller: Controller

    def why_eager(self) -> str | None:
        """Why the call in progress can't be captured, or None."""

    def decisions(self) -> tuple:
        """What else decides on the host how the call in progress runs."""

    def shared_tensors(self) -> Any:
        """What calls have in common on the device, and graphs read by its address."""

    def announce(self, symbols: Mapping[str, SparseSymbols], densities: Mapping[str, torch.Tensor]) -> None:
        """Tells the call in progress what its blocks have drawn and measured."""


@dataclass
class Captured:
    """A graph, and the tensors that it reads and writes.

    Args:
        inputs: where the tensors among a call's arguments go.
        output: of the transformer, as it nests its tensors; the next replay overwrites them.
        symbols, densities: of the call's sparse attentions, by name.
        fallbacks: that the report lists for it.
        held: keeps what the graph reads by its address.
    """

    graph: CudaGraph
    inputs: list[torch.Tensor]
    output: Any
    symbols: dict[str, SparseSymbols]
    densities: dict[str, torch.Tensor]
    fallbacks: list[dict[str, str]]
    held: Any


class StepGraphs:
    """The graphs of one transformer, by branch, shapes and everything that decides which kernels run.

    Args:
        driver: of the transformer.
        graph: the class that captures; tests have one for the CPU.
    """

    def __init__(self, driver: Driver, graph: type[CudaGraph] = CudaGraph) -> None:
        self._driver = driver
        self._graph = graph
        self._wanted = driver.controller.preset.kernels.graphs
        self._preset_refuses = why_not_preset(driver.controller.preset)
        self._failed: str | None = None
        self.clear()

    def __len__(self) -> int:
        """Graphs there are."""
        return sum(isinstance(kept, Captured) for kept in self._kept.values())

    def clear(self) -> None:
        """Drops all graphs and their memory."""
        # None = such a call has run once, a str says why it is not captured.
        self._kept: dict[tuple, Captured | Trial | str | None] = {}
        self._pool: Any = None
        self._modules: list[nn.Module] = []
        self._state: list[list] = []
        self._model_refuses: str | None = None

    def run(self, original: Callable, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The output of a call that computes: from a graph where there is one, else as ever.

        Args:
            original: the transformer's own forward; it has the hooks of its blocks.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        compute, kept = partial(original, *args, **kwargs), None
        reason = self._why_not(call, leaves)
        if reason is None:
            key = self._key(call, leaves, structure)
            if key not in self._kept:
                self._make_room(key)
                self._kept[key] = None
                return compute()
            kept = self._kept[key]
            if kept is None:
                output, trial = self._graph.watch(compute, self._device(leaves))
                self._kept[key] = why_not_output(output) or trial
                return output
            if isinstance(kept, Trial):
                is_shared = parallel_degree(self._driver.transformer) > 1
                kept = kept.why_not(self._wanted, is_shared=is_shared) or self._capture(
                    original, call, leaves, structure
                )
                self._kept[key] = kept
            reason = kept if isinstance(kept, str) else None
        if not isinstance(kept, Captured):
            self._say(reason, leaves)
            return compute()
        return self._replay(kept, leaves)

    def _say(self, reason: str | None, leaves: list) -> None:
        """Tells the report why a call runs as ever: in a note where graphs are wanted or went wrong."""
        report = self._driver.controller.report
        if self._wanted == "always" or self._failed is not None:
            report.note(f"{REFUSED}: {reason}")
        elif any(isinstance(leaf, torch.Tensor) and self._graph.why_not(leaf.device) is None for leaf in leaves):
            report.not_captured = reason

    def _replay(self, captured: Captured, leaves: list) -> Any:
        """The output of a call with such arguments, from its graph."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for static, given in zip(captured.inputs, tensors, strict=True):
            static.copy_(given)
        captured.graph.replay()
        self._driver.controller.report.replayed += 1
        for entry in captured.fallbacks:
            self._driver.controller.report.fall_back(**entry)
        self._driver.announce(captured.symbols, captured.densities)
        return pytree.tree_map_only(torch.Tensor, torch.clone, captured.output)

    def _capture(self, original: Callable, call: Call, leaves: list, structure: Any) -> Captured | str:
        """A new graph, or why the GPU or the model's code refuses; then no other is tried."""
        controller = self._driver.controller
        static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(static, structure)
        aside = replace(call, work={}, dense=set(), symbols={}, densities={}, measured=[])

        def compute() -> tuple:
            report = controller.report
            before = controller.call, report.fallbacks
            controller.call, report.fallbacks = aside, []
            try:
                return original(*args, **kwargs), aside.symbols, aside.densities, report.fallbacks
            finally:
                controller.call, report.fallbacks = before

        self._pool = self._pool or self._graph.new_pool()
        graph = self._graph(self._device(leaves), self._pool)
        try:
            made = graph.capture(compute)
        except Exception as error:  # whatever the driver, a kernel or the model's own code raises under capture
            first: BaseException = error
            while first.__context__ is not None:  # ending a capture that has failed raises too
                first = first.__context__
            self.clear()
            self._failed = f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0]}"
            return self._failed
        inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
        return Captured(graph, inputs, *made, self._driver.shared_tensors())

    def _why_not(self, call: Call, leaves: list) -> str | None:
        """Why a call runs as ever, or None."""
        if (reason := self._failed or self._preset_refuses) is not None:
            return reason
        if (reason := why_not_call(call, leaves) or self._driver.why_eager()) is not None:
            return reason
        device = self._device(leaves)
        return self._graph.why_not(device) or self._why_not_model(device)

    def _why_not_model(self, device: torch.device) -> str | None:
        """Likewise of the model; graphs of a model that has changed since are dropped."""
        if not self._modules or model_state(self._modules) != self._state:
            self.clear()
            self._modules = list(self._driver.transformer.modules())
            self._state = model_state(self._modules)
            self._model_refuses = why_not_model(self._driver.transformer, device)
            if self._model_refuses is None and self._wanted == "auto":
                self._model_refuses = why_not_known(self._driver.transformer)
        return self._model_refuses

    def _key(self, call: Call, leaves: list, structure: Any) -> tuple:
        """Branch and shapes, and then everything else by which calls differ on the host."""
        forms = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        backend, _ = _AttentionBackendRegistry.get_active_backend()
        modes = call.skips, backend, torch.is_inference_mode_enabled(), *self._driver.decisions()
        return call.branch.name, tuple(call.branch.shapes), self._device(leaves), structure, forms, modes

    def _make_room(self, key: tuple) -> None:
        """Drops graphs of this branch at other shapes, and the oldest of too many."""
        self._kept = {each: kept for each, kept in self._kept.items() if each[0] != key[0] or each[1] == key[1]}
        while len(self._kept) >= MOST_GRAPHS:
            del self._kept[next(iter(self._kept))]

    @staticmethod
    def _device(leaves: Sequence) -> torch.device:
        return next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
