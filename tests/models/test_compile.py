"""Compiled blocks, and transformers that are compiled whole, run under the closed loop, which decides as without."""

import functools
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from dit_accel import accelerate_pipeline, accelerate_transformer, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models.beside.compiled import CompiledEntry, compiled_entry
from dit_accel.models.driver import FamilyDriver
from scripts.bench.card_memory.weights import WEIGHTS
from tests.levels import CLOSED_LOOP
from tests.models.test_transformer import recorded_calls
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 8


def in_place(pipe, **options):
    pipe.transformer.compile(**options)


def wrapped(pipe, **options):
    pipe.transformer = torch.compile(pipe.transformer, **options)


every_way = pytest.mark.parametrize("compile_whole", [in_place, wrapped])


@functools.cache
def uncompiled(name):
    """Outputs of a plain and of an accelerated pipeline, and the modes of its steps."""
    pipe = tiny_pipeline(name)
    plain = tiny_output(pipe, name, steps=STEPS)
    accelerate_pipeline(pipe, CLOSED_LOOP)
    return plain, tiny_output(pipe, name, steps=STEPS), [step.mode for step in pipe.dit_accel.report().steps]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


# Graphs: one per kind of block, and one more where FLUX's first single block reads the double blocks' outputs.
@pytest.mark.parametrize(("name", "graphs"), [("flux", (2, 3)), ("wan", (1, 1))])
def test_the_loop_decides_alike_with_compiled_blocks(name, graphs, monkeypatch):
    """Decisions are the same as with fused kernels in uncompiled blocks; a second run compiles nothing more."""
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    pipe = accelerate_pipeline(tiny_pipeline(name), "balanced", **{"schedule.target_error": 0.2})
    fused, steps = tiny_output(pipe, name, steps=STEPS), pipe.dit_accel.report().steps
    assert {step.mode for step in steps} == {"full", "update", "dispatch"}
    counter = CompileCounter()
    pipe.transformer.compile_repeated_blocks(backend=counter, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(tiny_output(pipe, name, steps=STEPS), fused, atol=1e-4, rtol=1e-4)
        compiled = pipe.dit_accel.report().steps
        assert [step.mode for step in compiled] == [step.mode for step in steps]
        errors = [[step.error for step in run if step.error is not None] for run in (compiled, steps)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-2) and graphs[0] <= counter.frame_count <= graphs[1]
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(  # every two of the three once, because compiling takes long
    ("compile_whole", "order", "name"),
    [
        (in_place, "after", "flux"),
        (in_place, "before", "wan22"),
        (wrapped, "before", "flux"),
        (wrapped, "after", "wan22"),
    ],
)
def test_a_transformer_compiled_whole_computes_what_the_loop_asks_for(compile_whole, order, name):
    """Same outputs and decisions as uncompiled, from one unbroken graph that runs in computed steps alone."""
    plain, expected, modes = uncompiled(name)
    traced = "aot_eager" if (name, order) == ("flux", "after") else "eager"  # it is slow
    pipe, counter, runs = tiny_pipeline(name), CompileCounterWithBackend(traced), []
    backend = lambda graph, inputs: _counted(counter(graph, inputs), runs)  # noqa: E731
    if order == "after":
        accelerate_pipeline(pipe, CLOSED_LOOP)
    compile_whole(pipe, backend=backend, fullgraph=True)
    entry = vars(pipe.transformer)["forward"] if compile_whole is wrapped else pipe.transformer._compiled_call_impl
    if order == "before":
        accelerate_pipeline(pipe, CLOSED_LOOP)
    for _ in range(2):
        runs.clear()
        torch.testing.assert_close(tiny_output(pipe, name, steps=STEPS), expected)
        report = pipe.dit_accel.report()
        assert [step.mode for step in report.steps] == modes and report.notes == []
        others = name == "wan22"  # it has two branches, and a second transformer, which is not compiled
        computed = sum(mode != "dispatch" for mode in modes)
        assert 0 < len(runs) < 2 * computed if others else len(runs) == computed
        assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    restore_pipeline(pipe)
    kept = vars(pipe.transformer)["forward"] if compile_whole is wrapped else pipe.transformer._compiled_call_impl
    assert kept is entry
    torch.testing.assert_close(tiny_output(pipe, name, steps=STEPS), plain)


def _counted(compiled, runs):
    return lambda *args: (runs.append(1), compiled(*args))[1]


@every_way
def test_graphs_of_a_plain_pipeline_serve_the_accelerated_one_and_the_restored(compile_whole, pipe):
    counter = CompileCounter()
    compile_whole(pipe, backend=counter, fullgraph=True)
    plain = tiny_output(pipe, "flux", steps=STEPS)
    for preset in ("exact", CLOSED_LOOP):
        accelerate_pipeline(pipe, preset)
        assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), plain) == (preset == "exact")
    assert torch.equal(tiny_output(restore_pipeline(pipe), "flux", steps=STEPS), plain)
    assert counter.frame_count == 1


def test_a_loop_of_ones_own_may_call_what_was_compiled(pipe):
    transformer, timesteps = pipe.transformer, [900.0, 600.0, 300.0]
    compiled = torch.compile(transformer, backend="eager", fullgraph=True)
    arguments = recorded_calls(pipe, "flux")[0]

    def run(model):
        return [model(**{**arguments, "timestep": torch.tensor([item / 1000])})[0] for item in timesteps]

    with torch.no_grad():
        plain = run(transformer)
        acceleration = accelerate_transformer(compiled, "exact", [item / 1000 for item in timesteps])
        torch.testing.assert_close(run(compiled), plain)
        assert acceleration.report().steps_by_mode == {"full": 3}
        acceleration.restore()
        torch.testing.assert_close(run(compiled), plain)


@pytest.mark.parametrize(("compile_whole", "order"), [(in_place, "offloaded first"), (wrapped, "compiled first")])
def test_model_offload_beside_it(compile_whole, order, pipe):
    plain, expected, _ = uncompiled("flux")
    offload = lambda pipe: pipe.enable_model_cpu_offload(device=torch.device("cpu"))  # noqa: E731
    compile_flux = functools.partial(compile_whole, backend="eager")
    for add in (compile_flux, offload) if order == "compiled first" else (offload, compile_flux):
        add(pipe)
    accelerate_pipeline(pipe, CLOSED_LOOP)
    for _ in range(2):
        torch.testing.assert_close(tiny_output(pipe, "flux", steps=STEPS), expected)
    restore_pipeline(pipe)
    torch.testing.assert_close(tiny_output(pipe, "flux", steps=STEPS), plain)
    assert not any(isinstance(value, CompiledEntry) for value in vars(pipe.transformer).values())


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("add", "what"),
    [
        (lambda pipe: pipe.transformer.compile_repeated_blocks(backend="eager"), r"block .*transformer_blocks\.0"),
        (functools.partial(in_place, backend="eager"), "FluxTransformer2DModel"),
        (functools.partial(wrapped, backend="eager"), "FluxTransformer2DModel"),
    ],
    ids=["blocks", "in_place", "wrapped"],
)
def test_what_the_preset_works_inside_of_must_not_be_compiled(add, what, order, pipe):
    """The error comes as soon as it can be known, and leaves the pipeline as it was."""
    message = rf"{what} is compiled, and preset 'flux-taylorseer' works inside of blocks: use a preset of level output"
    if order == "before":
        add(pipe)
        with pytest.raises(UnsupportedError, match=message):
            accelerate_pipeline(pipe, "flux-taylorseer")
        assert "dit_accel" not in vars(pipe)
    else:
        add(accelerate_pipeline(pipe, "flux-taylorseer"))
        with pytest.raises(UnsupportedError, match=message):
            tiny_output(pipe, "flux", steps=STEPS)


@pytest.mark.parametrize("form", ["plain", "q4"])
def test_blocks_compiled_one_by_one_go_on_as_compiled(pipe, monkeypatch, form):
    """Compiled blocks run even if another implementation would replace them, also with weights as in a .gguf file."""
    if form == "q4":
        pytest.importorskip("gguf")
        WEIGHTS[form][1](pipe.transformer)
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    plain, blocks = tiny_output(pipe, "flux", steps=2), pipe.transformer.transformer_blocks
    for index, block in enumerate(blocks):
        blocks[index] = torch.compile(block, backend="eager")
    accelerate_pipeline(pipe, "exact")
    torch.testing.assert_close(tiny_output(pipe, "flux", steps=2), plain)


class Compiled(torch.nn.Module):
    """A transformer whose compiled entry runs its forward and keeps its output's memory."""

    def __init__(self):
        super().__init__()
        self.seen, self.memory = [], torch.zeros(2)
        self._compiled_call_impl = self.enter

    def forward(self, x):
        return x + 1

    def enter(self, x):
        self.seen.append(vars(self).get("forward"))
        if x is None:
            raise RuntimeError("no input")
        self.memory.copy_(self.forward(x))
        return {"sample": self.memory, "others": (self.memory, 1)}


def test_what_is_compiled_runs_without_our_hook_and_its_memory_is_not_handed_out():
    """The forward seen by the compiler, or one put beneath, runs without our hook; the hook always comes back."""
    module = Compiled()
    hook = module.forward = lambda x: "hooked"
    entry = compiled_entry(module, module)
    assert module._compiled_call_impl is entry and entry(1) == "hooked" and compiled_entry(module, module) is entry
    plain = functools.partial(Compiled.forward, module)
    other = lambda x: x + 2  # noqa: E731
    for beneath, added in ((types.MethodType(Compiled.forward, module), 1), (plain, 1), (other, 2)):
        output = entry.compute(beneath, torch.zeros(2))
        assert torch.equal(output["sample"], torch.full((2,), float(added))) and output["others"][1] == 1
        assert module.forward is hook
        assert output["sample"].data_ptr() != module.memory.data_ptr() != output["others"][0].data_ptr()
    assert module.seen == [None, plain, other]
    with pytest.raises(RuntimeError, match="no input"):
        entry.compute(other, None)
    assert module.forward is hook


def test_an_entry_goes_back_unless_something_else_is_there():
    """accelerate's offload keeps one, too."""
    module = Compiled()
    before, entry = module._compiled_call_impl, compiled_entry(module, module)
    module._old_forward = entry
    entry.leave()
    assert module._compiled_call_impl == module._old_forward == before
    again = compiled_entry(module, module)
    module._compiled_call_impl = replaced = lambda x: x
    again.leave()
    assert module._compiled_call_impl is replaced
