"""Code inside a transformer whose state changes with every call sees every step; other code is still skipped."""

import functools
import itertools

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook

from dit_accel import accelerate_pipeline, stateless
from dit_accel.errors import UnsupportedError
from tests.levels import HEADS, LAYERS
from tests.parallel_ranks import modes_of
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 12


class Count:
    """Changes an output by an amount that depends on the number of earlier calls."""

    calls = 0

    def __call__(self, output):
        self.calls += 1
        factor = 1.3 if self.calls < 6 else 1.0
        return [part * factor for part in output] if isinstance(output, tuple) else output * factor


class Kept:
    """Count its calls in a tensor, changed in place, in a slot."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = torch.zeros(1)

    def __call__(self, output):
        self.calls += 1
        return output


def by_closure():
    calls = 0

    def count(output):
        nonlocal calls
        calls += 1
        return output

    return count


def by_iterator():
    turns, calls = itertools.count(), iter(range(10**6))
    return lambda output: output if next(turns) == next(calls) else None


MODULE_STATE = {"calls": 0}


def by_global():
    def count(output):
        MODULE_STATE["calls"] += 1
        return output

    return count


STATES = {
    "attribute": Count,
    "tensor": Kept,
    "closure": by_closure,
    "iterator": by_iterator,
    "default": lambda: lambda output, calls=[]: calls.append(1) or output,
    "global": by_global,
}


def first_block(pipe):
    lists = (getattr(pipe.transformer, name, None) for name in ("transformer_blocks", "blocks"))
    return next(blocks for blocks in lists if blocks is not None)[0]


def processors(pipe, act):
    """Replace the attention processors by ones that pass their output to ``act``."""
    for module in pipe.transformer.modules():
        if hasattr(module, "processor"):
            kind = type(module.processor)
            call = lambda self, *args, kind=kind, **kwargs: act(kind.__call__(self, *args, **kwargs))  # noqa: E731
            module.processor = type("Acting", (kind,), {"__call__": call})()


def hook(pipe, act):
    first_block(pipe).register_forward_hook(lambda _, args, output: act(output))


def pre_hook(pipe, act):
    def enter(module, args, kwargs):
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": act(kwargs["hidden_states"])}
        return (act(args[0]), *args[1:]), kwargs

    first_block(pipe).register_forward_pre_hook(enter, with_kwargs=True)


def writing_hook(pipe, act):
    """A hook that returns None and changes the output in place."""

    def write(module, args, output):
        first = output[0] if isinstance(output, tuple) else output
        first.copy_(act(first))

    first_block(pipe).register_forward_hook(write)


def forward(pipe, act):
    block = first_block(pipe)
    original = block.forward
    block.forward = functools.wraps(original)(lambda *args, **kwargs: act(original(*args, **kwargs)))


def method(pipe, act):
    """A partial in place of the forward of a module inside of a block."""
    part = next(module for name, module in first_block(pipe).named_modules() if name.startswith("ff"))
    passed = torch.no_grad()(lambda original, *args, **kwargs: act(original(*args, **kwargs)))
    part.forward = functools.partial(passed, part.forward)


def whole_forward(pipe, act):
    original = pipe.transformer.forward

    @functools.wraps(original)
    def changed(*args, **kwargs):
        output = original(*args, **kwargs)
        act(torch.zeros(1))
        return output

    pipe.transformer.forward = changed


def module(pipe, act):
    """A module around another one."""

    class Around(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.act = inner, act

        def forward(self, *args, **kwargs):
            return self.act(self.inner(*args, **kwargs))

    pipe.transformer.proj_out = Around(pipe.transformer.proj_out)


def model_hook(pipe, act):
    class Acting(ModelHook):
        def post_forward(self, module, output):
            return act(output)

    HookRegistry.check_if_exists_or_initialize(first_block(pipe)).register_hook(Acting(), "acting")


WAYS = {
    "processors": (processors, "attention processor Acting of "),
    "hook": (hook, "hook "),
    "pre-hook": (pre_hook, "hook "),
    "writing-hook": (writing_hook, "hook "),
    "forward": (forward, "forward of "),
    "method": (method, "forward of "),
    "whole-forward": (whole_forward, "forward of "),
    "module": (module, "module proj_out (Around)"),
    "model-hook": (model_hook, "hook Acting on "),
}


def notes(pipe):
    return [note for note in pipe.dit_accel.report().notes if "dit_accel.stateless" in note]


def run(pipe, name="flux", **arguments):
    return tiny_output(pipe, name, steps=STEPS, **arguments)


CASES = [
    *(("flux", way, "attribute", "balanced") for way in WAYS),
    *(("sd3", "processors", state, "quality") for state in STATES),
    ("qwen-image", "forward", "attribute", "turbo"),
    ("wan", "hook", "iterator", "turbo"),
    ("hunyuan", "processors", "attribute", "turbo"),
]


@pytest.mark.filterwarnings("ignore:dit-accel")
@pytest.mark.parametrize("name, way, state, preset", CASES, ids=["-".join(case) for case in CASES])
def test_code_whose_state_changes_with_every_call_sees_every_step(name, way, state, preset):
    """Every step is computed and equals the plain pipeline's; the note names the code, its place and both ways out."""
    (add, named), state = WAYS[way], STATES[state]
    plain, pipe = tiny_pipeline(name), tiny_pipeline(name)
    add(plain, state())
    expected = run(plain, name)
    add(pipe, state())
    result = run(accelerate_pipeline(pipe, preset), name)
    assert "dispatch" not in modes_of(pipe) and torch.equal(result, expected)
    [note] = notes(pipe)
    assert note.startswith(f"every step computed: {named}") and "timestep" in note


@pytest.mark.filterwarnings("ignore:dit-accel")
@pytest.mark.parametrize("preset", [LAYERS, HEADS], ids=["layer", "head"])
def test_inside_of_blocks_too(preset):
    """Levels that forecast parts of blocks compute every step where a processor keeps state."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), preset)
    processors(pipe, Count())
    run(pipe)
    assert set(modes_of(pipe)) <= {"full", "update"} and len(notes(pipe)) == 1


@pytest.mark.filterwarnings("ignore:dit-accel")
def test_code_that_is_added_during_a_run_or_acts_late_sees_the_rest_of_it():
    """From the step on at which code that keeps state is added, all are computed; the next run begins anew."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "turbo")
    added, count = [], Count()

    def add(pipe, step, timestep, tensors):
        if step == 6:
            added.append(first_block(pipe).register_forward_hook(lambda _, args, output: count(output)))
        return tensors

    run(pipe, callback_on_step_end=add)
    assert "dispatch" in modes_of(pipe)[:7] and modes_of(pipe)[-3:].count("dispatch") == 0
    assert notes(pipe)[0].startswith("rest of the run computed: hook ")
    added[0].remove()
    run(pipe)
    assert "dispatch" in modes_of(pipe)[-6:] and not notes(pipe)


def caching(pipe):
    """Processors that fill a cache at their first call."""
    cache = {}
    processors(pipe, lambda output: cache.setdefault("ones", torch.ones(1)) and output)


def by_timestep(pipe):
    """A hook that depends on the timestep, which a hook around the transformer notes at every step."""
    now = {}
    note = lambda module, args, kwargs: now.update(timestep=kwargs["timestep"])  # noqa: E731
    pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    first_block(pipe).register_forward_hook(lambda _, args, output: None if now["timestep"].max() > 0.5 else output)


def watching(pipe):
    calls = []
    first_block(pipe).register_forward_hook(lambda *_: calls.append(1))


def declared(pipe):
    act = Count()
    processors(pipe, lambda output: act(torch.zeros(1)) is None or output)
    for module in pipe.transformer.modules():
        if hasattr(module, "processor"):
            stateless(module.processor)


def declared_hook(pipe):
    act = Count()
    first_block(pipe).register_forward_hook(stateless(lambda _, args, output: act(torch.zeros(1)) is None or output))


SKIPPED = (caching, by_timestep, watching, declared, declared_hook)


@pytest.mark.parametrize("add", SKIPPED, ids=lambda add: add.__name__)
def test_other_code_is_skipped(add):
    """As many steps are forecast as without it, and nothing is noted."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "turbo")
    run(pipe)
    expected = modes_of(pipe)
    add(pipe)
    run(pipe)
    assert modes_of(pipe) == expected and "dispatch" in expected and not notes(pipe)


def test_a_hook_that_may_return_something_later_is_noted():
    """A hook that has only watched, but has a branch that returns something, is named; steps are still forecast."""
    pipe, calls = accelerate_pipeline(tiny_pipeline("flux"), "turbo"), []

    def late(module, args, output):
        calls.append(1)
        if len(calls) > 100:
            return output
        return None

    handle = first_block(pipe).register_forward_hook(late)
    run(pipe)
    [note] = notes(pipe)
    assert "late of " in note and "only watched" in note and "dispatch" in modes_of(pipe)
    handle.remove()
    first_block(pipe).register_forward_hook(stateless(late))
    run(pipe)
    assert not notes(pipe)


def test_code_without_attributes_cant_be_declared():
    """The error says what to pass instead."""
    with pytest.raises(UnsupportedError, match="pass a function"):
        stateless([].append)
