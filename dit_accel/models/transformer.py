"""Driver of any diffusers transformer: level ``output``, which only needs the model's forward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.hooks.hooks import BaseState, StateManager
from torch.utils import _pytree as pytree

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.branch import Call
from dit_accel.loop.controller import WHOLE_BATCH, Controller
from dit_accel.loop.memory import ModelSize
from dit_accel.loop.rows import Rows
from dit_accel.loop.runs import Runs
from dit_accel.loop.tracker import Place, StepMode
from dit_accel.models.beside.compiled import CompiledEntry, compiled_entry
from dit_accel.models.beside.control_net import NUMBERS, computed, hook_of
from dit_accel.models.beside.foreign_code import ForeignCode
from dit_accel.models.beside.other_caches import refuse_other_cache, replaced_forward, replaced_forward_remark
from dit_accel.models.beside.quantized_linears import LinearHook, QuantizedLinears
from dit_accel.models.caller import calling_pipeline
from dit_accel.models.conditions import Conditions
from dit_accel.models.families.family import (
    FURTHER_LATENTS,
    LATENTS,
    TIMESTEPS,
    further_latents_of,
    latents_of,
    timestep_names,
)
from dit_accel.models.graphs.step_graphs import StepGraphs
from dit_accel.models.hooks import (
    HOOK_NAME,
    LINEAR_HOOK,
    Hook,
    find_hook,
    is_offloaded_above,
    lift_hook,
    lift_split,
    parameter_names,
    register_hook,
    remove_hook,
    split_above,
)
from dit_accel.models.parallel.branches import GROUP, SharedBranches
from dit_accel.models.parallel.context_parallel import agreed, gathered, parallel_degree
from dit_accel.models.samples import arguments_of_rows, guidance_parts, prompt_rows, why_not_divisible

GRADIENTS = (
    "calls whose inputs or weights require gradients run unaccelerated; if nothing is trained, put them under "
    "torch.no_grad()"
)
NO_TIMESTEP = "calls without a timestep run unaccelerated, because their step is unknown"
NO_NAMES = (
    "calls with unnamed arguments run unaccelerated: the transformer's forward was replaced by a function of *args and "
    "**kwargs; decorate that with functools.wraps of the original forward"
)
TENSOR = object()  # marks a predicted tensor in the remembered structure of an output
BESIDE = (
    "tensors of the output that are no predictions, such as a key-value cache, are those of the latest computed step"
)


class TransformerDriver:
    """Drives one transformer from outside: forecasts its output, or runs it and measures the forecast's error.

    Args:
        transformer: a diffusers transformer that a pipeline calls once per step and branch.
        runs: runs over the transformer; the controller of each run decides the modes of its calls.
        name: the transformer's name in the pipeline.
        called: returns the transformer, or its wrapper from ``torch.compile`` if the pipeline calls that.
    """

    family_name = "any"
    levels = ("output",)
    token_order: torch.Tensor | None = None  # of the latest call's vision tokens, int64 [S]; None = raster order

    def __init__(
        self, transformer: torch.nn.Module, runs: Runs, name: str, called: Callable[[], torch.nn.Module]
    ) -> None:
        self.transformer = transformer
        self.runs = runs
        self.name = name
        self.called = called
        self._net: Callable[[], torch.nn.Module | None] = lambda: None
        self.compiled: CompiledEntry | None = None  # while attached, where the transformer is compiled whole
        self._parameters = parameter_names(transformer)
        self._conditions = Conditions(transformer)
        self._foreign = ForeignCode(transformer)
        self._branches = SharedBranches(transformer, runs)
        self._hooked: list[tuple[torch.nn.Module, str]] = []
        self._linears: QuantizedLinears | None = None
        preset = self.controller.preset
        self._works_inside = preset.works_inside
        captures = preset.kernels.graphs != "never" and preset.forecast.level == "output"
        self.graphs = StepGraphs(self) if captures else None
        is_replaced = replaced_forward(transformer) is not None  # the new function may not name its arguments
        self._timesteps = timestep_names(self._parameters) or TIMESTEPS
        if not is_replaced and not timestep_names(self._parameters):
            raise UnsupportedError(
                f"transformer {type(transformer).__name__} takes no {', '.join(map(repr, TIMESTEPS))} or timesteps of "
                "parts ('vision_timesteps'), so its steps can't be distinguished; a wrapper must hold one transformer: "
                "call accelerate_pipeline before you wrap it, or accelerate_transformer on the transformer inside"
            )

    @property
    def controller(self) -> Controller:
        """Controller of the call in progress, or of the latest one."""
        return self.runs.current

    @property
    def net(self) -> torch.nn.Module | None:
        """ControlNet that is called before the transformer."""
        return self._net()

    def watch(self, net: torch.nn.Module | None) -> None:
        """Set the ControlNet, which the pipeline may drop."""
        if net is not None:
            self._net = weakref.ref(net)

    def layers(self) -> list[str]:
        """Names of the blocks that the report lists."""
        return [self.name]

    def prepare(self) -> None:
        """Check the preset against the transformer before anything is hooked; raise an error if they do not fit."""
        if self.controller.preset.linear.dtype is not None:
            section = self.controller.preset.linear
            self._linears = QuantizedLinears(self.transformer, section, self._note, self._free_graphs)

    def attach(self, acceleration: Any) -> None:
        """Hook the transformer; ``acceleration`` is the object that a later acceleration restores first."""
        self.hook(self.transformer, TransformerHook(self, acceleration))
        self.compiled = compiled_entry(self.transformer, self.called())
        if self._linears is not None:
            for layer in self._linears.layers.values():
                self.hook(layer, LinearHook(self._linears), LINEAR_HOOK)
            self._linears.on_host.attach()

    def inherit(self, earlier: TransformerDriver) -> None:
        """Take over weights that wait on the host from an earlier driver of the same transformer."""
        if earlier.transformer is self.transformer and None not in (self._linears, earlier._linears):
            self._linears.inherit(earlier._linears)

    def _free_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def _note(self, remark: str) -> None:
        self.controller.report.note(remark)

    def hook(self, module: torch.nn.Module, hook: Hook, name: str = HOOK_NAME) -> None:
        """Hook a module until :meth:`detach`."""
        register_hook(module, hook, name)
        self._hooked.append((module, name))
        if module is not self.transformer:
            lift_split(module)

    @property
    def is_attached(self) -> bool:
        return getattr(find_hook(self.transformer), "driver", None) is self

    def detach(self) -> None:
        """Undo :meth:`attach`, also on modules that the transformer or the pipeline no longer has."""
        while self._hooked:
            remove_hook(*self._hooked.pop())
        if self.compiled is not None:
            self.compiled.put_back()
        self._free_graphs()
        if self._linears is not None:
            self._linears.free()

    def return_weights(self) -> None:
        """Move weights that wait on the host back to the device."""
        if self._linears is not None:
            self._linears.on_host.give_all_back()

    def release(self) -> None:
        """Free memory of a finished run; rounded weights stay if graphs read them by address."""
        self.controller.release()
        self._conditions.release()
        self._foreign.release()
        if (hook := hook_of(self.net)) is not None:
            hook.release()
        if self._linears is not None and not self.graphs:  # None, or empty
            self._linears.release()

    def computing(self, forward: Callable) -> Callable:
        """Return the function that computes a call: the forward beneath our hook, or its compiled form."""
        self.compiled = compiled_entry(self.transformer, self.called(), self.compiled)
        return forward if self.compiled is None else partial(self.compiled.compute, forward)

    def account(self, call: Call, arguments: dict[str, Any]) -> None:
        """Fill ``call.work`` and ``call.branch.plain``; here the transformer counts as one block of one unit."""
        call.work[self.name] = call.branch.plain[self.name] = 1.0, 0.0

    def used(self, output: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the part of the output ``[B, …]`` that the pipeline uses; forecasts are compared on it."""
        return output

    def _used_rows(self, arguments: dict[str, Any], output: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Apply :meth:`used` to an output that holds some samples of the call's batch."""
        return self.used(output, arguments if rows is None else arguments_of_rows(arguments, rows))

    def size(self, arguments: dict[str, Any]) -> ModelSize:
        """Size of a call's records; here only outputs, assumed to be as large as the latents."""
        tensors = [*latents_of(arguments), *further_latents_of(arguments)]
        if not tensors:
            return ModelSize()
        return ModelSize(output=sum(each.numel() for each in tensors), itemsize=tensors[0].element_size())

    def lengths(self, arguments: dict[str, Any]) -> tuple:
        """Lengths besides shapes on which records of the blocks depend."""
        return ()

    def names(self, args: tuple) -> bool:
        """Return True if each positional argument of a call has a name."""
        return len(args) <= len(self._parameters)

    def named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a transformer call by name, without defaults."""
        return {**dict(zip(self._parameters, args, strict=False)), **kwargs}

    def forward(self, original: Callable, context: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one transformer call, or forecast its output.

        Args:
            original: the transformer's forward beneath our hook.
            context: diffusers' cache context: the branch of guidance as the pipeline names it, and in diffusers 0.42
                the step if the pipeline gives it; before, the name alone; None = the pipeline sets none.
        """
        place, context = place_of(context), getattr(context, "name", context)
        arguments = self.named(args, kwargs)
        timestep = timestep_of(arguments, self._timesteps)
        if timestep is None:
            self.controller.stand_aside(None, NO_TIMESTEP)
            return self.computing(original)(*args, **kwargs)
        # MiniMax-H3 has one timestep for each noise level, whose number varies over a run.
        tensors: dict[str, list[torch.Tensor]] = {}
        for name, each in arguments.items():
            if isinstance(each, torch.Tensor):
                tensors[name] = [each]
            elif not isinstance(each, (*NUMBERS, type(None))):
                tensors[name] = [leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, torch.Tensor)]
        shapes = [leaf.shape for name, each in tensors.items() if name not in self._timesteps for leaf in each]
        lengths = self.lengths(arguments) if self._works_inside else ()
        form = *shapes, *lengths, arguments.get("return_dict", True)
        conditions = partial(self._conditions.of, arguments, self.runs.caller, self.net)
        asked = partial(self.size, arguments), partial(self.samples_in, context, arguments), conditions, place
        latents = [leaf for name in (*LATENTS, *FURTHER_LATENTS) for leaf in tensors.get(name, ())]
        with self.controller.calling(self.name, context, timestep, form, *asked, latents) as call:
            if call.forecasts_output:
                return _nested(call.branch.structure, self.controller.forecast_output(call))
            return self.run(call, self.computing(original), (args, kwargs), arguments)

    def run(self, call: Call, original: Callable, given: tuple[tuple, dict], arguments: dict[str, Any]) -> Any:
        """Run a call with its blocks, and pass its output to the loop.

        Args:
            original: function that computes a call.
            given: the same arguments as ``arguments``, as the pipeline passed them or by name.
        """
        if (remark := replaced_forward_remark(self.transformer, self.name)) is not None:
            self._note(remark)
        if call.computed_rows is not None and call.mode is not StepMode.DISPATCH:
            given = (), arguments_of_rows(arguments, call.computed_rows)
        if self._linears is not None:
            rows = len(call.computed_rows or ())
            kind = call.branch.name, call.branch.shapes, call.mode, call.skips, rows
            self._linears.begin(self.controller.report, kind)
        args, kwargs = given = computed(given)
        compute = partial(original, *args, **kwargs)
        if self.graphs is not None:
            compute = partial(self.graphs.run, original, call, args, kwargs)
        if self._linears is not None:
            compute = partial(self._linears.timed, self.controller.report, compute)
        if self.controller.may_forecast:
            compute = partial(self._watched, call, compute)
        try:
            output = self._branches.run(call, given, compute, partial(self._observe, call, arguments))
        finally:
            if self._linears is not None:
                self._linears.end_call()
        self.account(call, arguments)
        return output

    def _watched(self, call: Call, compute: Callable[[], Any]) -> Watched:
        """Run a call, and compare the state of code inside the transformer before and after it."""
        output = self._foreign.run(compute)
        change: Any = self._foreign.change(call.branch)
        if parallel_degree(self.transformer) > 1 or hasattr(self.transformer, GROUP):
            tensor = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
            change = torch.tensor([change], device=tensor.device)  # devices agree on the largest
        return Watched(output, change)

    def _take_change(self, call: Call, numbers: Sequence[float]) -> None:
        """Compute every step if code inside the transformer keeps state that changes with every call."""
        if not self.controller.may_forecast:
            return
        for remark in self._foreign.watchers(call.branch):
            self._note(remark)
        if (reason := self._foreign.take(call.branch, *numbers)) is not None:
            has_forecast = any(step.mode == StepMode.DISPATCH.value for step in self.controller.report.steps[:-1])
            self.controller.compute_all(f"{'rest of the run' if has_forecast else 'every step'} computed: {reason}")

    def _observe(self, call: Call, arguments: dict[str, Any], output: Any) -> Any:
        """Pass the output of a computed call to the loop, and return the output for the pipeline."""
        if isinstance(output, Watched):
            output, change = output
            take = partial(self._take_change, call)
            take([change]) if isinstance(change, float) else call.measure([change], take)
        leaves, spec = pytree.tree_flatten(output)
        flagged = list(zip(leaves, predictions(leaves, arguments), strict=True))
        tensors = tuple(leaf for leaf, is_predicted in flagged if is_predicted)
        call.branch.structure = spec, [TENSOR if is_predicted else leaf for leaf, is_predicted in flagged]
        if len(tensors) < sum(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._note(BESIDE)
        if call.mode is StepMode.DISPATCH:
            self.controller.leave(tensors)
        elif tensors:
            going_on = self.controller.observe(call, tensors, partial(self._used_rows, arguments))
            output = output if going_on is tensors else _nested(call.branch.structure, going_on)
        self.controller.read(call, partial(agreed, self.transformer))
        return output

    # For CUDA graphs of computed steps.

    def why_eager(self) -> str | None:
        """Return why the call in progress can't be captured, or None."""
        if self._foreign.counts:
            return "code inside the transformer keeps state that changes with every call"
        if self._linears is not None and self._linears.is_timing:
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

    def stand_aside(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note that a call runs unaccelerated, because forecasts and kernels give no gradients."""
        self.controller.stand_aside(timestep_of(self.named(args, kwargs), self._timesteps), GRADIENTS)

    def samples_in(self, context: str | None, arguments: dict[str, Any]) -> Sequence[Rows]:
        """Return the rows of each prompt in a batch if the preset schedules prompts separately, else all rows."""
        if not self.controller.preset.schedule.per_prompt:
            return WHOLE_BATCH
        if (reason := why_not_divisible(arguments)) is not None:
            self.controller.report.note(f"prompts of a batch computed together: {reason}")
            return WHOLE_BATCH
        return prompt_rows(context, arguments["hidden_states"], guidance_parts(self.transformer))


def place_of(context: Any) -> Place | None:
    """Return the step that a cache context gives; None = it gives none."""
    step = getattr(context, "step_index", None)
    return None if step is None else Place(step, context.num_inference_steps)


def timestep_of(arguments: dict[str, Any], names: Sequence[str] = TIMESTEPS) -> Any:
    """Return the argument of one of these names that identifies a call's step; None = there is none."""
    given = [value for name in names if (value := arguments.get(name)) is not None]
    return next((each for each in given if not isinstance(each, torch.Tensor) or each.numel()), None)


def predictions(leaves: Sequence, arguments: dict[str, Any]) -> list[bool]:
    """Return for each leaf of a transformer's output True if it is a prediction for latents.

    The first leaf is one if it is a tensor. Another leaf is one if it has the shape of some latents of the call, except
    for the number of channels.
    """
    shapes = [each.shape for each in (*latents_of(arguments), *further_latents_of(arguments))]
    return [
        isinstance(leaf, torch.Tensor) and (place == 0 or any(_differ_in_one(leaf.shape, shape) for shape in shapes))
        for place, leaf in enumerate(leaves)
    ]


def _differ_in_one(shape: torch.Size, other: torch.Size) -> bool:
    """Return True if two shapes differ in at most one dimension."""
    return len(shape) == len(other) and sum(a != b for a, b in zip(shape, other, strict=True)) <= 1


def _nested(structure: tuple, tensors: Sequence[torch.Tensor]) -> Any:
    """Put tensors into the structure of the transformer's latest output."""
    spec, leaves = structure
    remaining = iter(tensors)
    return pytree.tree_unflatten([next(remaining) if leaf is TENSOR else leaf for leaf in leaves], spec)


class Watched(NamedTuple):
    """Output of a call, and the change of the state of code inside the transformer: a number, or float32 [1]."""

    output: Any
    change: Any


class Contexts(StateManager):
    """Branch of guidance of each thread's current call."""

    def __init__(self, state: type[BaseState]) -> None:
        self._of_thread = threading.local()
        super().__init__(state)

    @property
    def _context(self) -> Any:
        return getattr(self._of_thread, "context", None)

    @_context.setter
    def _context(self, context: Any) -> None:
        self._of_thread.context = context


class TransformerHook(Hook):
    """Routes a transformer's forward through its driver; the branch comes from diffusers' cache context."""

    _is_stateful = True
    runs_eagerly = True

    def __init__(self, driver: TransformerDriver, acceleration: Any) -> None:
        super().__init__()
        self.driver = driver
        self.acceleration = acceleration
        self.contexts = Contexts(BaseState)  # diffusers sets the context on any StateManager of a stateful hook
        self._is_first_call = True  # in a pipeline's call

    @torch.compiler.disable
    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.driver.runs.calling(calling_pipeline(module)):
            if not self.driver.is_attached:  # another thread has ended the acceleration since the call began
                return self.fn_ref.original_forward(*args, **kwargs)
            if (split := split_above(module)) is not None:  # parallelism was enabled later: the loop sees whole calls
                lift_hook(module, HOOK_NAME)
                args, kwargs = gathered(split, args, kwargs)
                return module.forward(*args, **kwargs)
            refuse_other_cache(module, self.driver.name, by_hooks=self._is_first_call)
            self._is_first_call = False
            original = self.fn_ref.original_forward
            if not self.driver.names(args):
                self.driver.controller.stand_aside(None, NO_NAMES)
                return self.driver.computing(original)(*args, **kwargs)
            if torch.is_grad_enabled() and _wants_gradients(module, args, kwargs):
                self.driver.stand_aside(args, kwargs)
                return self.driver.computing(original)(*args, **kwargs)
            # diffusers < 0.38 keeps the context's name in another attribute.
            context = self.contexts._context or getattr(self.contexts, "_current_context", None)
            output = self.driver.forward(original, context, args, kwargs)
            if is_offloaded_above(module):  # enabled later, or by loading a LoRA: forecast steps must move no weights
                lift_hook(module, HOOK_NAME)
            return output

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """End a run; diffusers calls this at the end of a pipeline call."""
        with self.driver.runs.calling(calling_pipeline(module)):
            self.driver.release()
        self._is_first_call = True
        return module


def _wants_gradients(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if a call's inputs or weights require gradients, given that gradients are enabled."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return any(each.requires_grad for each in (*module.parameters(), *tensors))
