"""Calls of a transformer in the order of time: describe, begin the step, forecast or compute, end the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import is_, ne
from typing import Any

import torch
from diffusers.hooks.hooks import BaseState, StateManager
from torch.utils import _pytree as pytree

from dit_accel.errors import UnsupportedError
from dit_accel.loop.branch import WHOLE_BATCH, Call, Description
from dit_accel.loop.controller import Controller
from dit_accel.loop.memory import ModelSize
from dit_accel.loop.report import TOGETHER
from dit_accel.loop.rows import Rows
from dit_accel.loop.tracker import Place, StepMode
from dit_accel.models.beside.control_net import NUMBERS, computed
from dit_accel.models.beside.foreign_code import Watched
from dit_accel.models.beside.other_caches import refuse_other_cache, replaced_forward_remark
from dit_accel.models.caller import calling_pipeline
from dit_accel.models.families.family import FURTHER_LATENTS, LATENTS, TIMESTEPS, further_latents_of, latents_of
from dit_accel.models.hooks import HOOK_NAME, OFFLOAD_HOOK, Hook, hooks_above, lift_hook, split_above
from dit_accel.models.parallel.branches import is_shared
from dit_accel.models.parallel.context_parallel import agreed, gathered
from dit_accel.models.runs import Runs
from dit_accel.models.samples import arguments_of_rows, guidance_parts, prompt_rows, why_not_divisible
from dit_accel.models.transformer import TransformerDriver

GRADIENTS = (
    "calls whose inputs or weights require gradients run unaccelerated; if nothing is trained, put them under "
    "torch.no_grad()"
)
NO_TIMESTEP = "calls without a timestep run unaccelerated, because their step is unknown"
NO_NAMES = (
    "calls with unnamed arguments run unaccelerated: the transformer's forward was replaced by a function of *args and "
    "**kwargs; decorate that with functools.wraps of the original forward"
)
OWN_CLOCKS = (
    "schedule.max_seconds is for one process, got several that share a call, whose clocks differ: set "
    "schedule.computed_steps"
)
TENSOR = object()  # marks a predicted tensor in the remembered structure of an output
BESIDE = "tensors of the output that are no predictions, such as a key-value cache, are of the latest computed step"
ALL_LATENTS = (*LATENTS, *FURTHER_LATENTS)


class Session:
    """Owns the calls of one transformer, which run one at a time and may nest."""

    def __init__(self, driver: TransformerDriver, runs: Runs) -> None:
        self.driver = driver
        self.runs = runs
        self.run: Controller = runs.latest  # of the call in progress, otherwise of the latest call
        self.call: Call | None = None  # in progress, which blocks read
        self.pipeline: Any = None  # that makes the call in progress
        self.is_first = True  # no call of the pipeline's run has been computed yet
        self._outer: list[tuple[Controller, Call | None, Any]] = []  # states before each call that has begun

    def begin(self, pipeline: Any) -> None:
        """Reserve the transformer for a call of a pipeline; None = of this thread's own loop."""
        run = self.runs.begin(pipeline)
        self._outer.append((self.run, self.call, self.pipeline))
        self.run, self.call, self.pipeline = run, None, pipeline

    def end(self) -> None:
        """End the call, and go on with the call in which it has begun."""
        run, self.call, self.pipeline = self._outer.pop()
        if self._outer:
            self.run = run
        self.runs.end()

    def forward(self, original: Callable, context: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one transformer call by its forward beneath our hook, or forecast its output.

        ``context`` is diffusers' cache context: the branch of guidance as the pipeline names it, and in diffusers 0.42
        the step if the pipeline gives it; before, the name alone; None = the pipeline sets none.
        """
        driver = self.driver
        if len(args) > len(driver.parameters):
            return self._aside(NO_NAMES, None, original, args, kwargs)
        arguments = {**dict(zip(driver.parameters, args, strict=False)), **kwargs}
        timestep = timestep_of(arguments, driver.timesteps)
        if torch.is_grad_enabled() and _wants_gradients(driver.transformer, args, kwargs):
            return self._aside(GRADIENTS, timestep, original, args, kwargs)
        if timestep is None:
            return self._aside(NO_TIMESTEP, None, original, args, kwargs)
        call = self.call = self.run.begin(self._describe(context, timestep, arguments))
        try:
            if call.forecasts_output:
                output = _nested(call.branch.structure, self.run.forecast_output(call))
            else:
                output = self._compute(call, original, (args, kwargs), arguments)
        except BaseException:
            self.run.abort()
            raise
        self.run.end(call)
        if driver.graphs is not None and call.tick.is_last:
            driver.graphs.give_way(call.branch.name)
        return output

    def _describe(self, context: Any, timestep: Any, arguments: dict[str, Any]) -> TransformerCall:
        driver = self.driver
        shapes: list[Any] = []
        latents: dict[str, Sequence[torch.Tensor]] = {}
        for name, value in arguments.items():
            leaves: Sequence[torch.Tensor] = ()
            if isinstance(value, torch.Tensor):
                leaves = (value,)
            elif not isinstance(value, (*NUMBERS, type(None))) and (type(value) is not dict or value):
                leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if name not in driver.timesteps:  # MiniMax-H3 has one for each noise level, whose number varies over a run
                shapes += [leaf.shape for leaf in leaves]
            if name in ALL_LATENTS:
                latents[name] = leaves
        if driver.works_inside:
            shapes += driver.lengths(arguments)
        step = getattr(context, "step_index", None)
        return TransformerCall(
            driver.name,
            getattr(context, "name", context),
            timestep,
            (*shapes, arguments.get("return_dict", True)),
            None if step is None else Place(step, context.num_inference_steps),
            [*chain.from_iterable(map(latents.get, ALL_LATENTS, repeat(())))],
            session=self,
            arguments=arguments,
        )

    def _aside(self, reason: str, timestep: Any, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call without the loop, which notes the reason."""
        self._refuse_other_cache()
        self.run.stand_aside(timestep, reason)
        linears, in_8_bits = self.driver.linears, nullcontext[None]()
        if linears is not None and reason is not GRADIENTS:  # under which few layers run in 8 bits
            in_8_bits = linears.call(self.run.report, reason, self.driver.conditions.read_weights())
        with in_8_bits:
            return self.driver.computing(original)(*args, **kwargs)

    def _refuse_other_cache(self) -> None:
        refuse_other_cache(self.driver.transformer, self.driver.name, by_hooks=self.is_first)
        self.is_first = False

    def _compute(self, call: Call, original: Callable, passed: tuple[tuple, dict], arguments: dict[str, Any]) -> Any:
        """Run a call with its blocks, and pass its output to the loop; ``passed`` and ``arguments`` are the same."""
        self._refuse_other_cache()
        driver, run = self.driver, self.run
        if run.preset.schedule.max_seconds is not None and is_shared(driver.transformer):
            raise UnsupportedError(OWN_CLOCKS)
        original = driver.computing(original)
        passed, arguments = driver.enter(call, passed, arguments)
        if (remark := replaced_forward_remark(driver.transformer, driver.name)) is not None:
            call.report.note(remark)
        if call.computed_rows is not None and call.mode is not StepMode.DISPATCH:
            passed = (), arguments_of_rows(arguments, call.computed_rows)
        args, kwargs = passed = computed(passed)
        if run.may_forecast:
            original = partial(driver.foreign.compare, original)
        compute = partial(original, *args, **kwargs)
        if driver.graphs is not None:
            compute = partial(driver.graphs.run, original, call, args, kwargs)
        in_8_bits: AbstractContextManager = nullcontext()
        if driver.linears is not None:
            kind = call.branch.name, call.branch.shapes, call.mode, call.skips, len(call.computed_rows or ())
            version = driver.conditions.weights if run.may_forecast else driver.conditions.read_weights()
            in_8_bits = driver.linears.call(call.report, kind, version)
            compute = partial(driver.linears.timed, call.report, compute)
        if run.may_forecast:
            compute = partial(driver.foreign.watch, call.branch, compute)
        with in_8_bits:
            output = driver.branches.run(self, call, passed, compute, partial(self._observe, run, call, arguments))
        driver.account(call, arguments)
        return output

    def _observe(self, run: Controller, call: Call, arguments: dict[str, Any], output: Any) -> Any:
        """Pass the output of a computed call to the loop, and return the output for the pipeline."""
        driver = self.driver
        if isinstance(output, Watched):
            output, change = output
            take = partial(driver.foreign.settle, run, call.branch)
            take([change]) if isinstance(change, float) else call.measure([change], take)
        leaves, spec = pytree.tree_flatten(output)
        flagged = list(zip(leaves, predictions(leaves, arguments), strict=True))
        tensors = tuple(leaf for leaf, is_predicted in flagged if is_predicted)
        if type(output) is tuple and len(output) == len(tensors) and all(map(is_, output, tensors)):
            call.branch.structure = None
        else:
            call.branch.structure = spec, [TENSOR if is_predicted else leaf for leaf, is_predicted in flagged]
        if len(tensors) < sum(isinstance(leaf, torch.Tensor) for leaf in leaves):
            call.report.note(BESIDE)
        if call.mode is StepMode.DISPATCH:
            run.leave(tensors)
        elif tensors:
            going_on = run.observe(call, tensors, partial(driver.used, arguments))
            output = output if going_on is tensors else _nested(call.branch.structure, going_on)
        if driver.works_inside or call.tick.is_last or is_shared(driver.transformer):
            run.read(call, partial(agreed, driver.transformer))
        else:
            run.read_later(call)
        return output

    def release(self) -> None:
        self.run.release()
        self.driver.release()
        self.is_first = True


@dataclass(kw_only=True)
class TransformerCall(Description):
    """A transformer call by its arguments, which are named."""

    session: Session
    arguments: dict[str, Any]

    def size(self) -> ModelSize:
        return self.session.driver.size(self.arguments)

    def samples(self) -> Sequence[Rows]:
        """Return the rows of each prompt in a batch if the preset schedules prompts separately, else all rows."""
        driver = self.session.driver
        if not driver.preset.schedule.per_prompt:
            return WHOLE_BATCH
        if (reason := why_not_divisible(self.arguments)) is not None:
            self.session.run.report.note(f"{TOGETHER}: {reason}")
            return WHOLE_BATCH
        return prompt_rows(self.context, self.arguments["hidden_states"], guidance_parts(driver.transformer))

    def conditions(self) -> Mapping[str, Any]:
        driver = self.session.driver
        net = None if driver.net is None else driver.net()
        return driver.conditions.of(self.arguments, self.session.pipeline, net)


class Contexts(threading.local, StateManager):
    """Branch of guidance of each thread's current call."""


class TransformerHook(Hook):
    """Passes a transformer's calls to its session; the branch comes from diffusers' cache context."""

    _is_stateful = True
    runs_eagerly = True

    def __init__(self, session: Session, acceleration: Any) -> None:
        super().__init__()
        self.session = session
        self.acceleration = acceleration
        self.contexts = Contexts(BaseState)  # diffusers sets the context on any StateManager of a stateful hook

    @torch.compiler.disable
    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        session.begin(calling_pipeline(module))
        try:
            registry = vars(module).get("_diffusers_hook")
            if registry is None or registry.hooks.get(HOOK_NAME) is not self:
                # Another thread has ended the acceleration since the call began.
                return self.fn_ref.original_forward(*args, **kwargs)
            if registry._hook_order[-1] != HOOK_NAME and (split := split_above(module)) is not None:
                lift_hook(module, HOOK_NAME)  # parallelism was enabled later: the loop sees whole calls
                args, kwargs = gathered(split, args, kwargs)
                return module.forward(*args, **kwargs)
            # diffusers < 0.38 keeps the context's name in another attribute.
            context = self.contexts._context or getattr(self.contexts, "_current_context", None)
            output = session.forward(self.fn_ref.original_forward, context, args, kwargs)
            if registry._hook_order[-1:] != [HOOK_NAME] and OFFLOAD_HOOK in hooks_above(module):
                lift_hook(module, HOOK_NAME)  # enabled later, or by loading a LoRA: forecast steps must move no weights
            return output
        finally:
            session.end()

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """End a run; diffusers calls this at the end of a pipeline call."""
        self.session.begin(calling_pipeline(module))
        try:
            self.session.release()
        finally:
            self.session.end()
        return module


def timestep_of(arguments: dict[str, Any], names: Sequence[str] = TIMESTEPS) -> Any:
    """Return the argument of one of these names that identifies a call's step; None = there is none."""
    for name in names:
        value = arguments.get(name)
        if value is not None and (not isinstance(value, torch.Tensor) or value.numel()):
            return value
    return None


def predictions(leaves: Sequence, arguments: dict[str, Any]) -> list[bool]:
    """Return for each leaf of a transformer's output True if it is a prediction for latents.

    The first tensor is one, and others with the shape of some latents of the call, except for the number of channels.
    """
    shapes = [item.shape for item in (*latents_of(arguments), *further_latents_of(arguments))]
    return [
        isinstance(leaf, torch.Tensor)
        and (place == 0 or any(leaf.ndim == len(shape) and sum(map(ne, leaf.shape, shape)) <= 1 for shape in shapes))
        for place, leaf in enumerate(leaves)
    ]


def _nested(structure: tuple | None, tensors: Sequence[torch.Tensor]) -> Any:
    """Put tensors into the structure of the transformer's latest output; None = a tuple of predictions."""
    if structure is None:
        return tuple(tensors)
    spec, leaves = structure
    remaining = iter(tensors)
    return pytree.tree_unflatten([next(remaining) if leaf is TENSOR else leaf for leaf in leaves], spec)


def _wants_gradients(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if a call's inputs or weights require gradients, given that gradients are enabled."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return any(item.requires_grad for item in (*module.parameters(), *tensors))
