"""CUDA graphs of computed steps: a step's launches are captured once and replayed with one launch.

In launch-bound steps Python takes longer to launch kernels than the GPU takes to run them. A computed step at level
``output`` decides nothing on the host and has fixed shapes. The first step of a kind runs eagerly, to compile kernels
and fill caches. The second is measured, the third is captured. From then on inputs are copied in, the graph is
replayed, and outputs are copied out. Decisions of the loop, forecasts and measurements stay outside of the graph.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.errors import headline
from dit_accel.kernels.kept import capturing
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.branch import BlockCall, Call
from dit_accel.loop.torch_modes import kernel_settings
from dit_accel.models.free_memory import is_short
from dit_accel.models.graphs.cuda_graph import CaptureTrial, CudaGraph, Turns
from dit_accel.models.graphs.limits import why_not_call, why_not_known, why_not_module, why_not_output, why_not_preset
from dit_accel.models.graphs.state import ModelState
from dit_accel.models.parallel.context_parallel import exchanges_sizes, parallel_degree

MOST_GRAPHS = 8  # kept at a time: two branches, dense and with skipped tiles, and twice as many to spare
NEW = object()  # marks the first call of a kind
REFUSED = "computed steps not captured as CUDA graphs"
CROWDED = "other computed steps need the memory of their graph"
CONTROLLED = "memory is short, and the ControlNet needs it in each step"
Announced = tuple[Mapping[str, SparseSymbols], Mapping[str, torch.Tensor]]  # symbols and densities by site
UNEVEN = "tokens or heads can't be divided evenly among the GPUs, which then ask for each other's sizes"


class Announcement:
    """Symbols and densities of a captured call's attentions, packed to be copied with one launch per dtype.

    The loop and the report keep them, while the next replay of any graph of the pool may overwrite their memory. It is
    made during the capture, so that packing is part of the graph.
    """

    def __init__(self, announced: Announced) -> None:
        alike: dict[torch.dtype, list[torch.Tensor]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            alike.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
            return torch.empty_like(tensor, device="meta")

        self._forms = _mapped(pack, announced)
        self._packed = {dtype: (torch.cat(items), [*map(torch.numel, items)]) for dtype, items in alike.items()}

    def copied(self) -> Announced:
        """Copy symbols and densities of the latest replay."""
        parts = {dtype: iter(packed.clone().split(sizes)) for dtype, (packed, sizes) in self._packed.items()}
        return _mapped(lambda form: next(parts[form.dtype]).view(form.shape), self._forms)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], announced: Announced) -> Announced:
    """Change each tensor once, even if several sites share it, always in the same order."""
    changed: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    symbols, densities = announced
    of_symbols = {name: item.mapped(once) for name, item in symbols.items()}
    return of_symbols, {name: once(item) for name, item in densities.items()}


@dataclass
class Captured:
    """A graph and the static tensors that it reads and writes."""

    graph: CudaGraph
    inputs: list[torch.Tensor]  # copies of the tensors among a call's arguments
    output: Any  # nested output of the transformer; the next replay overwrites its tensors
    announcement: Announcement
    fallbacks: list[dict[str, str]]  # entries of the report for the call
    held: Any  # keeps alive everything that the graph reads by address
    trial: CaptureTrial | None = None  # of a graph on loan: to capture by again


class StepGraphs:
    """The graphs of one transformer, by branch, shapes and everything else that decides which kernels run.

    If memory is short, graphs are on loan: they are freed after the last step, before the decoding, and before computed
    calls of any transformer that are not replayed. Later steps capture them again.
    """

    _all: ClassVar[list[weakref.ref["StepGraphs"]]] = []  # a list, which other threads may add to meanwhile

    def __init__(self, driver: Any, graph: type[CudaGraph] = CudaGraph) -> None:
        self._driver = driver
        self._graph = graph  # tests use a fake for the CPU
        self._wanted = driver.preset.kernels.graphs
        self._preset_refuses = why_not_preset(driver.preset)
        self._failed: str | None = None
        self._lends = False  # decoding has lacked memory
        self._lock = threading.RLock()  # guards all attributes: several threads may call one transformer
        self._turns = Turns()  # serialises uses of static inputs and of the pool
        self._run: object = None  # report of the run in which the model was looked at
        self._changes = 0  # of the model in that run
        self._refusals = WeakIdKeyDictionary()  # by report of a run: why nothing is captured in it
        self.clear()
        self._all.append(weakref.ref(self, self._all.remove))

    def __len__(self) -> int:
        return sum(isinstance(kept, Captured) for kept in self._kept.values())

    def clear(self) -> None:
        with self._lock:
            self._turns.end()
            # None = such a call has run once; a str = the reason why it is not captured.
            self._kept: dict[tuple, Captured | CaptureTrial | str | None] = {}
            self._pool: Any = None
            self._state: ModelState | None = None

    def give_way(self, *of: Any, reason: str | None = None) -> None:
        """Free graphs on loan, of a branch or on a device; with a reason, such calls are not captured again."""
        with self._lock:
            lent = {key: item.trial for key, item in self._kept.items() if isinstance(item, Captured) and item.trial}
            if freed := {key: reason or trial for key, trial in lent.items() if not of or of[0] in key}:
                self._turns.end()
                self._kept |= freed

    @classmethod
    def _holding(cls) -> Iterator["StepGraphs"]:
        return (graphs for item in [*cls._all] if (graphs := item()) is not None)  # also those without a graph

    @classmethod
    def lend_all(cls) -> None:
        """Free all graphs because other work lacks memory; later ones are on loan."""
        for graphs in cls._holding():
            graphs._lends = True
            graphs.clear()

    def run(self, original: Callable, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the output of a computed call of the transformer's own forward, from a graph if there is one."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        compute = partial(original, *args, **kwargs)
        with self._lock:
            key, kept = None, self._why_not(call, leaves)
            if kept is None:
                kept = self._kept.get(key := self._key(call, leaves, structure), NEW)
            if kept is NEW:
                self._make_room(key)
                self._kept[key] = None
            if isinstance(kept, (CaptureTrial, Captured)):
                with self._turns.turn(self._device(leaves)):
                    if isinstance(kept, CaptureTrial):
                        kept = self._kept[key] = self._try(kept, original, call, leaves, structure)
                    if isinstance(kept, Captured):
                        return self._replay(kept, leaves)
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        for graphs in self._holding():
            graphs.give_way(*devices, reason=CROWDED if graphs is self and isinstance(kept, str) else None)
        if kept is None:
            output, trial = self._graph.watch(compute, self._device(leaves))
            with self._lock:
                if key in self._kept and trial.is_complete:
                    uneven = UNEVEN if exchanges_sizes(self._driver.transformer) else None  # known once it has run
                    self._kept[key] = why_not_output(output) or uneven or trial
            return output
        report = self._driver.session.run.report
        if isinstance(kept, str) and (self._wanted == "always" or self._failed is not None):
            report.note(f"{REFUSED}: {kept}")
        elif isinstance(kept, str) and any(self._graph.why_not(device) is None for device in devices):
            report.not_captured = kept
        return compute()

    def _replay(self, captured: Captured, leaves: list) -> Any:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for static, tensor in zip(captured.inputs, tensors, strict=True):
            static.copy_(tensor)
        captured.graph.replay()
        self._driver.session.run.report.replayed += 1
        for entry in captured.fallbacks:
            self._driver.session.run.report.fall_back(**entry)
        self._driver.announce(*captured.announcement.copied())
        return pytree.tree_map_only(torch.Tensor, torch.clone, captured.output)

    def _try(
        self, trial: CaptureTrial, original: Callable, call: Call, leaves: list, structure: Any
    ) -> Captured | CaptureTrial | str:
        """Capture a new graph, or return why not, or the trial if a later call may be captured."""
        memory = self._graph.memory(self._device(leaves))
        reason = trial.why_not(self._wanted, memory, is_shared=parallel_degree(self._driver.transformer) > 1)
        is_lent = self._wanted == "auto" and (self._lends or is_short(memory, trial.peak))
        if is_lent and self._driver.net is not None:
            reason = reason or CONTROLLED
        if is_lent and reason is None and call.tick.is_last:  # the graph would be freed at once
            return trial
        kept = reason or self._capture(original, call, leaves, structure)
        if is_lent and isinstance(kept, Captured):
            kept.trial = trial
        return kept

    def _capture(self, original: Callable, call: Call, leaves: list, structure: Any) -> Captured | str:
        """Capture a new graph, or return why it failed; then no further capture is tried."""
        session, report = self._driver.session, call.report
        static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(static, structure)
        aside = replace(call, work={}, measured=[])
        aside.blocks = BlockCall(call.blocks.facts, turns=call.blocks.turns)

        def compute() -> tuple:
            before = session.call, report.fallbacks
            session.call, report.fallbacks = aside, []
            try:
                output = original(*args, **kwargs)
                return output, Announcement((aside.blocks.symbols, aside.blocks.densities)), report.fallbacks
            finally:
                session.call, report.fallbacks = before

        if not self:  # a pool whose last graph is gone can't be captured into again
            self._pool = self._graph.new_pool()
        graph = self._graph(self._device(leaves), self._pool)
        try:
            with capturing() as capture:
                result = graph.capture(compute)
        except Exception as error:  # the driver, a kernel or the model's own code may raise anything under capture
            first: BaseException = error
            while first.__context__ is not None:  # ending a failed capture raises too
                first = first.__context__
            self.clear()
            self._failed = headline(first)
            return self._failed
        inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
        return Captured(graph, inputs, *result, (capture.held, self._driver.shared_tensors()))

    def _why_not(self, call: Call, leaves: list) -> str | None:
        reason = self._failed or self._preset_refuses or why_not_call(call, leaves) or self._driver.why_eager()
        if reason is not None:
            return reason
        device = self._device(leaves)
        return self._graph.why_not(device) or self._why_not_model(device)

    def _why_not_model(self, device: torch.device) -> str | None:
        """Return why the model can't be captured, or None; free all graphs if the model has changed."""
        report = self._driver.session.run.report
        if report in self._refusals:
            return self._refusals[report]
        if report is not self._run:
            self._run, self._changes = report, 0
        changed, model = None, self._driver.transformer
        is_bare = self._state is not None and why_not_module("", model, device) is None  # no new hook lies around it
        if is_bare and (changed := self._state.change()) is None:
            return None
        self.clear()
        self._changes += changed is not None
        for name, module in model.named_modules():
            if (reason := why_not_module(name, module, device)) is None and self._wanted == "auto":
                reason = why_not_known(name, module)
            if reason is not None:
                self._refusals[report] = reason
                return reason
        self._state = ModelState(model)
        return None if changed is None or self._changes < 2 else f"{changed} changes from step to step"

    def _key(self, call: Call, leaves: list, structure: Any) -> tuple:
        """Key of a kind of call: branch and shapes, then everything else on the host that calls may differ in."""
        forms = tuple(  # with types, because 1 == 1.0 == True
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
        )
        backend, _ = _AttentionBackendRegistry.get_active_backend()
        modes = call.skips, backend, torch.is_inference_mode_enabled(), *kernel_settings(), *self._driver.decisions()
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
        return call.branch.name, shapes, self._device(leaves), structure, forms, modes

    def _make_room(self, key: tuple) -> None:
        """Free graphs of this branch at other shapes, and the oldest graphs above the limit."""
        staying = {item: kept for item, kept in self._kept.items() if item[0] != key[0] or item[1] == key[1]}
        while len(staying) >= MOST_GRAPHS:
            del staying[next(iter(staying))]
        if len(staying) < len(self._kept):
            self._turns.end()
            self._kept = staying

    @staticmethod
    def _device(leaves: Sequence) -> torch.device:
        return next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
