"""CUDA graphs of computed steps: when they are captured, replayed and dropped; on the CPU, with a faked graph."""

import functools
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.models.free_memory import GIB
from dit_accel.models.graphs import step_graphs
from dit_accel.models.graphs.cuda_graph import CaptureTrial
from dit_accel.models.graphs.limits import why_not_output, why_not_preset
from dit_accel.models.graphs.state import ModelState
from dit_accel.models.graphs.step_graphs import CROWDED, MOST_GRAPHS, REFUSED, Announcement, StepGraphs
from dit_accel.models.hooks import stateless
from tests.models.test_transformer import recorded_calls
from tests.tiny import same_weights, tiny_output, tiny_pipeline

pytestmark = pytest.mark.usefixtures("own_attention_backend")

STEPS = 8
SPARGE = {"policy": "sparge", "steps": "all", "tau_kv": 0.3}
TILES = {"skip": SPARGE, "warmup": 2}  # two steps compute all tiles
CASES = {
    "dense": ("flux", load_preset("exact"), 1),
    "closed-loop": ("flux", load_preset("turbo"), 1),
    "tiles": ("flux", load_preset("flux-sparge-balanced", **{"skip.tau_kv": 0.3}), 2),
    "tiles-by-interceptor": ("sd3", load_preset("turbo", **TILES), 2),
    "two-branches": ("wan", load_preset("video-turbo", model="wan", **TILES), 4),
    "masked-text": ("hunyuan", load_preset("video-turbo", model="hunyuan_video", **TILES), 2),
    "token-order": ("wan", load_preset("video-turbo", model="wan", **TILES, blocks={"token_order": "hilbert"}), 4),
    "cubes": ("wan", load_preset("wan21-fastwan", interval=2, warmup=2), 4),
    "control-net": ("flux-controlnet", load_preset("balanced"), 1),
    "two-transformers": ("wan22", load_preset("video-balanced"), 4),
    "no-facts": ("ltx", load_preset("balanced"), 1),
    "8-bits": ("flux", load_preset("turbo", linear={"dtype": "int8"}), 1),
    "8-bits-on-host": ("flux", load_preset("turbo", linear={"dtype": "int8", "weights": "host"}), 1),
}


def accelerated(name, preset, wanted="always", pipe=None, **overrides):
    return accelerate_pipeline(pipe or tiny_pipeline(name), preset, **{"kernels.graphs": wanted}, **overrides)


def with_and_without(name, preset, change=None, **overrides):
    """Two pipelines over the same weights: without graphs, and with them."""
    pipe = tiny_pipeline(name)
    pipes = [
        accelerated(name, preset, wanted, item, **overrides)
        for wanted, item in (("never", same_weights(pipe)), ("always", pipe))
    ]
    for item in pipes if change else ():
        change(item)
    return pipes


def outputs_are_equal(pipes, name, **arguments):
    return torch.equal(*(tiny_output(pipe, name, steps=STEPS, **arguments) for pipe in pipes))


def find_driver(pipe):
    return pipe.transformer._diffusers_hook.hooks["dit_accel"].session.driver


def facts(report):
    """Decisions of a run, from its report."""
    steps = [(step.mode, step.error) for step in report.steps]
    return steps, report.density, report.attentions, report.fallbacks, report.computed_fraction, report.notes


@pytest.mark.parametrize("name, preset, kinds", CASES.values(), ids=CASES)
def test_outputs_and_decisions_are_those_without_graphs(graph, name, preset, kinds):
    """Runs capture each kind of call at its third occurrence."""
    plain, replayed = pipes = with_and_without(name, preset)
    for _ in range(2):
        assert outputs_are_equal(pipes, name)
        reports = plain.dit_accel.report(), replayed.dit_accel.report()
        assert facts(reports[1]) == facts(reports[0])
        symbols, same = plain.dit_accel.symbols(), replayed.dit_accel.symbols()
        assert symbols.keys() == same.keys()
        assert all(torch.equal(same[site].skip_bits, item.skip_bits) for site, item in symbols.items())
    assert graph.captures == kinds and reports[0].replayed == 0 < reports[1].replayed
    assert "CUDA graphs" in str(reports[1]) and "CUDA graphs" not in str(reports[0])


def test_the_first_two_calls_of_a_kind_run_as_ever(graph):
    """Kernels compile and caches fill in one, the other is watched; the third is captured, and all are replayed."""
    pipe = accelerated("flux", "exact")
    tiny_output(pipe, "flux", steps=2)
    assert (graph.captures, graph.replays) == (0, 0)
    tiny_output(pipe, "flux", steps=1)
    assert (graph.captures, graph.replays) == (1, 1)
    tiny_output(pipe, "flux", steps=3)
    assert (graph.captures, graph.replays) == (1, 4)


def test_an_output_stays_what_it_was(graph):
    """The next replay overwrites the graph's own output, but not the callers' tensors."""
    pipe, held = accelerated("flux", "exact"), []
    keep = stateless(lambda _, args, output: held.append((output[0], output[0].clone())))
    pipe.transformer.register_forward_hook(keep)
    tiny_output(pipe, "flux", steps=4)
    assert graph.captures == 1 and all(torch.equal(output, copy) for output, copy in held)


def test_hooks_around_a_transformer_come_and_go(graph):
    """A run with a stateless one, such as a timer, replays the graphs of earlier runs; another one is not skipped."""
    pipe, seen = accelerated("flux", "exact"), []
    tiny_output(pipe, "flux", steps=3)
    for count, hook in enumerate([stateless(lambda *_: seen.append(1)), lambda *_: seen.append(1)], 1):
        handle = pipe.transformer.register_forward_hook(hook)
        tiny_output(pipe, "flux", steps=3)
        handle.remove()
        assert (graph.captures, len(seen)) == (1, 3 * count)
    assert f"{REFUSED}: FluxTransformer2DModel carries hooks" in pipe.dit_accel.report().notes[0]


def test_arguments_in_another_order_are_captured_again(graph):
    """Timestep and guidance, two tensors of one shape, are not exchanged."""
    pipes, order = with_and_without("flux", "turbo"), ["timestep", "guidance"]

    @stateless
    def arranged(module, args, kwargs):
        return args, {name: kwargs[name] for name in [*order, *kwargs]}

    for pipe in pipes:
        pipe.transformer.register_forward_pre_hook(arranged, with_kwargs=True)
    for _ in range(2):
        assert outputs_are_equal(pipes, "flux") and graph.captures
        order.reverse()


def test_equal_numbers_of_other_types_are_captured_again(graph):
    """A model may compute with 1 and 1.0 in other dtypes."""
    pipe, flags = accelerated("flux", "exact"), [False]
    before = stateless(lambda module, args, kwargs: (args, {**kwargs, "return_dict": flags[-1]}))
    pipe.transformer.register_forward_pre_hook(before, with_kwargs=True)
    tiny_output(pipe, "flux", steps=STEPS)
    flags.append(0)
    tiny_output(pipe, "flux", steps=STEPS)
    assert graph.captures == 2


def test_another_size_takes_the_place_of_the_one_before(graph):
    """Only one size has graphs at a time."""
    pipe = accelerated("flux", "exact")
    for side in (64, 96, 64):
        tiny_output(pipe, "flux", steps=3, height=side, width=64)
        assert len(find_driver(pipe).graphs) == 1
    assert graph.captures == 3


def test_graphs_are_bounded(graph):
    """Arguments that never repeat, such as a LoRA's scale, make a limited number of graphs."""
    pipe = accelerated("flux", "exact")
    for scale in range(2 * MOST_GRAPHS):
        tiny_output(pipe, "flux", steps=3, joint_attention_kwargs={"scale": 1 + scale / 16})
    assert len(find_driver(pipe).graphs) == MOST_GRAPHS


GROWING = {
    "hook": (lambda model: model[1].register_forward_hook(print), "1._forward_hooks"),
    "pre-hook": (lambda model: model[1].register_forward_pre_hook(print), "1._forward_pre_hooks"),
    "second-hook": (lambda model: model[0].register_forward_hook(print), "0._forward_hooks"),
    "no bias": (lambda model: setattr(model[1], "bias", None), "the address of a weight"),
    "dict": (lambda model: model.notes.update(key=1), "notes.key"),
    "buffer": (lambda model: model[1].register_buffer("mask", torch.ones(2)), "1 (buffers).mask"),
    "module": (lambda model: model[1].register_module("more", torch.nn.Identity()), "1.more"),
}


@pytest.mark.parametrize("change, named", GROWING.values(), ids=GROWING)
def test_additions_to_a_model_are_changes(change, named):
    """Containers that were empty at the capture, and hooks on any module, count; and so does a weight that is gone."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    model.notes = {}
    state = ModelState(model)
    assert state.change() is None
    change(model)
    assert (state.change() or "").startswith(named)


def test_restoring_drops_them(graph):
    """Their memory is freed."""
    pipe = accelerated("flux", "exact")
    tiny_output(pipe, "flux", steps=3)
    kept = find_driver(pipe).graphs
    assert len(kept) == 1
    restore_pipeline(pipe)
    assert len(kept) == 0 and kept._pool is None and kept._state is None


def watched(pipe):
    pipe.transformer.register_forward_pre_hook(lambda *_: None)


def hooked(pipe):
    pipe.transformer.transformer_blocks[1].register_forward_hook(lambda *_: None)


def compiled(pipe):
    pipe.transformer.transformer_blocks[0].compile(backend="eager")


REFUSALS = {
    "masks-kept": ({"skip": {**SPARGE, "refresh": 2}}, None, {}, "masks are kept from step to step"),
    "probe": ({"skip": {**SPARGE, "probe_blocks": 1}}, None, {}, "the probe looks at other queries"),
    "hook-outside": ({}, watched, {}, "FluxTransformer2DModel carries hooks"),
    "hooks": ({}, hooked, {}, "transformer_blocks.1 carries hooks"),
    "compiled": ({}, compiled, {}, "transformer_blocks.0 is compiled"),
    "prompts-apart": ({"schedule.per_prompt": True}, None, {"prompt": ["a", "b"]}, "prompts of a batch are computed"),
}


@pytest.mark.parametrize("overrides, change, arguments, reason", REFUSALS.values(), ids=REFUSALS)
def test_what_can_not_be_captured_runs_as_ever_and_says_why(graph, overrides, change, arguments, reason):
    """The report has one note, and results are those without graphs."""
    pipes = with_and_without("flux", "turbo", change, model="flux", **overrides)
    assert outputs_are_equal(pipes, "flux", **arguments)
    (note,) = [note for note in pipes[1].dit_accel.report().notes if "CUDA graphs" in note]
    assert reason in note


@pytest.fixture
def graphs(graph):
    """Graphs of a transformer, and reports of two runs that share it."""
    driver = find_driver(accelerated("flux", "exact"))
    return driver.graphs, [SimpleNamespace(report=replace(driver.session.run.report)) for _ in range(2)]


def test_runs_that_alternate_look_at_a_refused_model_once_each(graphs, monkeypatch):
    graphs, runs = graphs
    looks = []
    monkeypatch.setattr(step_graphs, "why_not_module", lambda *_: looks.append(None) or "a weight is elsewhere")
    for run in 3 * runs:
        graphs._driver.session.run = run
        assert graphs._why_not_model(torch.device("cpu")) == "a weight is elsewhere"
    assert len(looks) == 2


def test_a_model_that_changes_at_each_step_is_refused_until_graphs_are_freed(graphs, monkeypatch):
    graphs, (run, _) = graphs
    graphs._driver.session.run = run
    monkeypatch.setattr(ModelState, "change", lambda self: "a flag")
    reasons = [graphs._why_not_model(torch.device("cpu")) for _ in range(3)]
    graphs.clear()
    reasons.append(graphs._why_not_model(torch.device("cpu")))
    assert reasons == [None, None, "a flag changes from step to step", None]


def test_prompts_of_unequal_length_are_captured_by_their_lengths(graph):
    """With skipped tiles, attention runs sample by sample."""
    pipes = with_and_without("hunyuan", load_preset("video-turbo", model="hunyuan_video", **TILES))
    prompts, captures = ["a cat", "a dog that runs across a field of yellow flowers"], []
    for inputs in (prompts, prompts, prompts[::-1], prompts[::-1], prompts):
        assert outputs_are_equal(pipes, "hunyuan", prompt=inputs)
        captures.append(graph.captures)
    assert captures[1] < captures[3] == captures[4] and pipes[1].dit_accel.report().replayed > 0


def test_a_capture_that_fails_is_not_tried_again(graph):
    """The call runs as ever, and so do all that follow; the report has the first line of the error."""
    graph.refuses = RuntimeError("operation not permitted when stream is capturing\nmore of it")
    _, pipe = pipes = with_and_without("flux", "turbo")
    assert outputs_are_equal(pipes, "flux")
    notes = [note for note in pipe.dit_accel.report().notes if "CUDA graphs" in note]
    assert notes == [f"{REFUSED}: RuntimeError: operation not permitted when stream is capturing"]
    graph.refuses = None
    tiny_output(pipe, "flux", steps=STEPS)
    assert graph.captures == 0


def own_processor(pipe, _):
    attn = pipe.transformer.transformer_blocks[1].attn
    attn.processor = type("Own", (type(attn.processor),), {})()


def patched_processor(pipe, patch):
    processor = type(pipe.transformer.transformer_blocks[1].attn.processor)
    call = processor.__call__
    patch.setattr(processor, "__call__", functools.wraps(call)(lambda *args, **kwargs: call(*args, **kwargs)))


def replaced_forward(pipe, _):
    norm = pipe.transformer.norm_out
    norm.forward = functools.wraps(norm.forward)(lambda *args: type(norm).forward(norm, *args))


def wrapped_hook(pipe, _):
    """Around the transformer's forward as it is now, with our hook in it."""
    forward = pipe.transformer.forward
    pipe.transformer.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def patched_class(pipe, patch):
    forward = type(pipe.transformer).forward
    patch.setattr(type(pipe.transformer), "forward", functools.wraps(forward)(lambda *a, **k: forward(*a, **k)))


UNKNOWN = {
    "processor": (own_processor, "the attention processor of transformer_blocks.1.attn"),
    "processors": (patched_processor, "the attention processor of transformer_blocks.0.attn"),
    "forward": (replaced_forward, "norm_out runs a forward"),
    "around": (wrapped_hook, "FluxTransformer2DModel runs a forward"),
    "class": (patched_class, "FluxTransformer2DModel runs a forward"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change, reason", UNKNOWN.values(), ids=UNKNOWN)
def test_auto_does_not_repeat_what_it_does_not_know(graph, pipe, monkeypatch, change, reason, when):
    """Code of the user's own may do other things in other steps; who knows that it does not says ``always``."""
    if when == "before":
        change(pipe, monkeypatch)
    accelerated("flux", "exact", "auto", pipe=pipe)
    if when == "after":
        tiny_output(pipe, "flux", steps=5)
        assert graph.captures == 1
        change(pipe, monkeypatch)
    tiny_output(pipe, "flux", steps=5)
    assert graph.captures == (when == "after") and pipe.dit_accel.report().not_captured.startswith(reason)


def test_outputs_that_hold_more_than_tensors_are_not_repeated():
    """For example the cache that FLUX.2 Klein's transformer fills and returns."""
    assert why_not_output((torch.ones(1), [None, 2])) is None
    assert why_not_output((torch.ones(1), object())) == "the output holds object"


def test_a_prompt_of_another_length_behind_the_same_padding_is_captured_again(graph):
    """With skipped tiles the prompt's length decides which keys count."""
    pipes = with_and_without("qwen-image", load_preset("turbo", **TILES))
    for length in (4, 8, 4):
        mask = (torch.arange(8) < length)[None].long()
        text = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
        inputs = {"prompt": None, "prompt_embeds": text, "prompt_embeds_mask": mask, "true_cfg_scale": 1.0}
        assert outputs_are_equal(pipes, "qwen-image", **inputs)
    assert graph.captures >= 2


@pytest.mark.parametrize("wanted", ["never", "auto", "always"])
def test_weights_in_8_bits_stay_as_long_as_a_graph_reads_them(graph, wanted):
    """They are freed after a run unless a graph holds their addresses."""
    pipe = accelerated("flux", "exact", wanted, linear={"dtype": "int8"})
    for steps in (2, 3):
        tiny_output(pipe, "flux", steps=steps)
        assert bool(find_driver(pipe).linears._weights) == (steps == 3 and wanted != "never")


def test_an_error_in_a_call_leaves_the_run_as_it_was(graph):
    """An error under capture is raised again without capture, and reaches the caller."""
    pipe = accelerated("flux", "exact")
    tiny_output(pipe, "flux", steps=2)
    with pytest.raises(RuntimeError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.transformer.norm_out, "forward", lambda *_: torch.zeros(2) + torch.zeros(3))
        tiny_output(pipe, "flux", steps=3)
    assert find_driver(pipe).session.call is None


def test_a_replayed_step_tells_the_fallbacks_of_the_captured_one(graph):
    """Each run's report lists them, although Python runs in none of its steps."""
    pipe = accelerated("flux", "exact")
    report, block = pipe.dit_accel, pipe.transformer.transformer_blocks[0]
    original = block.forward

    def forward(*args, **kwargs):
        find_driver(pipe).session.run.report.fall_back("transformer_blocks.0", "for a test")
        return original(*args, **kwargs)

    block.forward = forward
    for _ in range(3):
        tiny_output(pipe, "flux", steps=STEPS)
        assert report.report().fallbacks == [{"site": "transformer_blocks.0", "reason": "for a test"}]
    assert report.report().replayed == STEPS


def test_tensors_that_sites_share_are_packed_and_copied_once():
    """Tensors of one site stay apart."""
    shared, density = torch.arange(2, dtype=torch.uint8).view(1, 2, 1), torch.tensor(0.5)
    sites = {name: SparseSymbols(shared, torch.full((1, 1, 2, 1), n).byte(), 1, 128, 64) for n, name in enumerate("ab")}
    copied, densities = (announcement := Announcement((sites, {"a": density, "b": density}))).copied()
    assert sorted(packed.numel() for packed, _ in announcement._packed.values()) == [1, 6]
    assert densities["a"] is densities["b"] and copied["a"].cache_bits is copied["b"].cache_bits
    assert torch.equal(copied["b"].cache_bits, shared) and densities["a"] == density
    assert [item.skip_bits.unique().tolist() for item in copied.values()] == [[0], [1]]


def test_a_probe_that_single_blocks_have_is_not_captured():
    layers = {"transformer_blocks.0": {"probe_blocks": 1}}
    assert "skip.probe_blocks" in why_not_preset(load_preset("flux-sparge-balanced", **{"skip.layers": layers}))
    assert why_not_preset(load_preset("flux-sparge-balanced", **{"skip.probe_blocks": 0, "skip.refresh": 1})) is None


def strengths(pipe):
    return [item.scaling for item in pipe.transformer.modules() if hasattr(item, "merged_adapters")]


def with_tensors(pipe, shape=()):
    """Strengths in tensors of the CPU, as peft has them if adapters are to be hot-swapped; launches take numbers."""
    config = LoraConfig(r=2, target_modules=["to_q", "proj_mlp"], init_lora_weights=False)
    pipe.transformer.add_adapter(config, "style")
    for scaling in strengths(pipe):
        scaling["style"] = torch.full(shape, scaling["style"])


def halved(pipe):
    for scaling in strengths(pipe):
        scaling["style"].fill_(0.5)


CHANGES = {  # of a model, after a preparation; tests/scripts/test_graph_situations.py has more
    "strength-in-a-tensor": (with_tensors, halved, 2),
    "strength-in-a-list": (partial(with_tensors, shape=(1,)), halved, 2),
    "a-weight": (None, lambda pipe: setattr(pipe.transformer.proj_out, "bias", torch.nn.Parameter(torch.ones(16))), 2),
    "attention-backend": (None, lambda pipe: pipe.transformer.set_attention_backend("_native_math"), 2),
    "values-of-a-weight": (None, lambda pipe: pipe.transformer.proj_out.weight.detach().mul_(1.5), 1),
}


@pytest.mark.parametrize(("prepare", "change", "captures"), CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_captured_again(graph, prepare, change, captures):
    """The first call after a change is not captured; values of weights are read where they are."""
    torch.manual_seed(0)
    pipe = accelerated("flux", "exact")
    if prepare is not None:
        prepare(pipe)
    tiny_output(pipe, "flux", steps=3)
    change(pipe)
    replayed = tiny_output(pipe, "flux", steps=3)
    assert graph.captures == captures
    assert torch.equal(replayed, tiny_output(restore_pipeline(pipe), "flux", steps=3))


@contextmanager
def replaced(owner, name, value):
    if not hasattr(owner, name):
        pytest.skip(f"torch has no {name}")
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


ATTEND = torch.nn.functional.scaled_dot_product_attention
MODES = {
    "backend": partial(attention_backend, "_native_math"),
    "inference-mode": torch.inference_mode,
    # The newer setting; torch's older getters raise after it is set.
    "precision": partial(replaced, torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    # Pages of attention kernels have users put theirs in the place of torch's, for the whole process.
    "function": partial(replaced, torch.nn.functional, ATTEND.__name__, lambda *qkv, **more: ATTEND(*qkv, **more) / 2),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_of_the_process_is_captured_again(graph, mode):
    """It launches other kernels, or makes other tensors."""
    pipe = accelerated("flux", "exact")
    tiny_output(pipe, "flux", steps=3)
    with mode():
        replayed = tiny_output(pipe, "flux", steps=3)
        assert graph.captures == 2 and torch.equal(replayed, tiny_output(restore_pipeline(pipe), "flux", steps=3))


WATCHED = {
    "counter": (partial(FlopCounterMode, display=False), "watches the call"),
    "hook": (partial(register_module_forward_hook, lambda *_: None), "watches the call"),
    "gradients": (torch.enable_grad, "gradients are enabled"),
    "autocast": (partial(torch.autocast, "cpu", torch.bfloat16), "autocast"),
}


@pytest.mark.parametrize(("mode", "reason"), WATCHED.values(), ids=WATCHED)
def test_calls_under_what_can_not_be_captured(graph, mode, reason):
    """A counter of FLOPs and a hook of all modules see each computed step."""
    pipe = accelerated("flux", "exact")
    pipe.transformer.requires_grad_(False)
    calls = recorded_calls(pipe, "flux")
    with torch.no_grad(), mode():
        for call in calls:
            pipe.transformer(**call)
    assert graph.captures == 0 and any(reason in note for note in pipe.dit_accel.report().notes)


WAITS = "the host waits for the GPU in model.py, line 7"
BOUND = "the step is not launch-bound: launches take 300 ms of 1000 ms"
FULL = "a graph of the step takes 1.5 GiB, and 1.0 GiB of the GPU are free"
TRIALS = {  # option, measured launches, wait and GiB free, and why nothing is captured
    "host-bound": ("auto", 0.9, None, 99, None),
    "gpu-bound": ("auto", 0.3, None, 99, BOUND),
    "gpu-bound-always": ("always", 0.3, None, 99, None),
    "no-room": ("auto", 1.0, None, 1, FULL),
    "no-room-always": ("always", 1.0, None, 1, None),
    "waits": ("auto", 1.0, "model.py, line 7", 99, WAITS),
    "waits-always": ("always", 1.0, "model.py, line 7", 99, WAITS),
}


@pytest.mark.parametrize(("wanted", "launched", "waits", "free", "reason"), TRIALS.values(), ids=TRIALS)
def test_steps_are_captured_where_it_helps(graph, wanted, launched, waits, free, reason):
    """Launch-bound steps if their memory is free; `always` overrides all but a capture that would fail."""
    graph.trial, graph.free = CaptureTrial(waits, lambda: launched, lambda: 1.0, GIB), free * GIB
    pipe = accelerated("flux", "exact", wanted)
    output, report = tiny_output(pipe, "flux", steps=5), pipe.dit_accel.report()
    assert graph.captures == (reason is None)
    is_noted = reason is not None and wanted == "always"
    assert report.notes == [f"{REFUSED}: {reason}"] * is_noted and report.not_captured == (None if is_noted else reason)
    assert ("no CUDA graphs" in str(report)) == (reason is not None and not is_noted)
    assert torch.equal(output, tiny_output(restore_pipeline(pipe), "flux", steps=5))


def test_graphs_leave_short_memory_to_decoding(graph):
    """They are freed after the last step, each branch's by itself, and captured again by the next run's first step."""
    graph.free = 2 * GIB
    plain, pipe = tiny_pipeline("wan"), None
    pipe = accelerated("wan", "exact", "auto", same_weights(plain))
    kept, expected = find_driver(pipe).graphs, tiny_output(plain, "wan", steps=4)
    held = []
    pipe.transformer.register_forward_hook(stateless(lambda *_: held.append(len(kept))))
    assert torch.equal(tiny_output(pipe, "wan", steps=4), expected)
    assert held == [0, 0, 0, 0, 1, 2, 1, 0] and graph.captures == 2
    assert torch.equal(tiny_output(pipe, "wan", steps=4), expected)
    assert held[8:] == [1, 2, 2, 2, 2, 2, 1, 0] and (graph.captures, graph.replays) == (4, 12)
    tiny_output(pipe, "wan", steps=1)
    assert graph.captures == 4  # for one step it would not be used again
    graph.free = 99 * GIB
    tiny_output(pipe, "wan", steps=2)
    assert len(kept) == 2
    StepGraphs.lend_all()  # as a decode that lacks memory
    assert len(kept) == 0 and torch.equal(tiny_output(pipe, "wan", steps=4), expected)
    assert len(kept) == 0 and graph.captures == 8


@pytest.mark.parametrize("is_same", [False, True], ids=["another-transformer", "the-same"])
def test_other_computed_calls_take_short_memory_from_graphs(graph, monkeypatch, is_same):
    """Graphs are captured again, unless calls of the same transformer can't be captured."""
    graph.free = 2 * GIB
    pipe, other = accelerated("flux", "exact", "auto"), accelerated("flux", "exact", "auto")
    kept, held = find_driver(pipe).graphs, []
    refusals = [None, None, None, "autocast"] if is_same else []
    monkeypatch.setattr(step_graphs, "why_not_call", lambda *_: refusals.pop(0) if refusals else None)

    def look(*_):
        held.append(len(kept))
        if held == [0, 0, 1] and not is_same:
            tiny_output(other, "flux", steps=1)
            held.append(len(kept))

    pipe.transformer.register_forward_hook(stateless(look))
    tiny_output(pipe, "flux", steps=6)
    assert held == ([0, 0, 1, 0, 0, 0] if is_same else [0, 0, 1, 0, 1, 1, 0])
    assert pipe.dit_accel.report().not_captured == (CROWDED if is_same else None)


@pytest.mark.parametrize(("wanted", "notes"), [("always", [f"{REFUSED}: computes on cpu"]), ("auto", [])])
def test_a_cpu_has_none(wanted, notes):
    """The report says so where a preset asks for them; presets have `auto`."""
    pipe = accelerated("flux", "balanced", wanted)
    tiny_output(pipe, "flux", steps=5)
    report = pipe.dit_accel.report()
    assert (report.not_captured, report.notes) == (None, notes)
    assert load_preset("balanced").kernels.graphs == "auto"
