"""Kept embeddings equal the encoder's bit for bit, and a change of anything that counts makes new ones."""

import copy
import gc
import pickle
import threading
import weakref
from types import FunctionType

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from peft import LoraConfig
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.loop.timing import CallParts
from dit_accel.stages.prompts import ENTRY, KeptPrompts, PromptStore
from tests.rounding import equal_up_to_rounding
from tests.tiny import encoders, tiny_inputs, tiny_output, tiny_pipeline

MEBIBYTE = 2**20
ENCODERS = {"clip": encoders.clip, "t5": encoders.t5, "llama": encoders.llama, "qwen": encoders.qwen}


class Pipe:
    """A pipeline with text encoders and nothing else."""

    def __init__(self, *encoders):
        for place, encoder in enumerate(encoders):
            setattr(self, f"text_encoder_{place + 1}", encoder)


class Kept:
    """An encoder with the stage on it, and the number of times that it really ran."""

    def __init__(self, encoder, most=MEBIBYTE):
        self.encoder, self.runs = encoder, 0
        self.pipe, self.parts = Pipe(encoder), CallParts()
        self.stage = KeptPrompts(self.pipe, self.parts, most)
        implementation = encoder._call_impl

        def run(*args, **kwargs):
            self.runs += 1
            return implementation(*args, **kwargs)

        encoder._call_impl = run

    def __call__(self, *args, **kwargs):
        return self.encoder(*args, **kwargs)

    def plain(self, *args, **kwargs):
        """The encoder's own output."""
        return type(self.encoder)._call_impl(self.encoder, *args, **kwargs)


@pytest.fixture
def kept():
    return Kept(encoder_of())


def encoder_of(kind="clip"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ENCODERS[kind]()["text_encoder"].eval()


def ids(seed=0, length=9):
    return torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(seed))


def tensors_of(output):
    """All tensors of an output with hidden states and a cache, by place."""
    if isinstance(output, torch.Tensor):
        return [output]
    if hasattr(output, "layers"):
        output = [tensor for layer in output.layers for tensor in (layer.keys, layer.values)]
    return [
        tensor
        for part in (output if isinstance(output, list | tuple) else output.to_tuple())
        for tensor in tensors_of(part)
    ]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_known_input_runs_no_encoder(kind):
    """The output has the same class, fields, strides and bits, of all hidden states and caches."""
    kept = Kept(encoder_of(kind))
    expected = kept.plain(ids(), output_hidden_states=True)
    for _ in range(3):
        output = kept(ids(), output_hidden_states=True)
        assert type(output) is type(expected) and list(output.keys()) == list(expected.keys())
        assert same(output, expected)
        assert [item.stride() for item in tensors_of(output)] == [item.stride() for item in tensors_of(expected)]
    assert kept.runs == 1


def test_every_input_counts(kept):
    """Ids, masks, dtypes, names and flags are compared by value."""
    mask = torch.ones_like(ids())
    for place in range(2):
        calls = [
            ((ids(),), {}),
            ((ids(1),), {}),
            ((ids(length=8),), {}),
            ((ids().int(),), {}),
            ((), {"input_ids": ids()}),
            ((ids(),), {"output_hidden_states": True}),
            ((ids(),), {"attention_mask": mask}),
            ((ids(),), {"attention_mask": mask.tril()}),
        ]
        for number, (args, kwargs) in enumerate(calls, 1):
            assert same(kept(*args, **kwargs), kept.plain(*args, **kwargs))
            assert kept.runs == (number if place == 0 else len(calls))


def test_a_copy_may_be_overwritten():
    """By whoever gets it, at the first call and at later calls; views of one tensor stay views of it."""
    kept = Kept(encoder_of("t5"))
    expected = kept.plain(ids(), output_hidden_states=True)
    for _ in range(3):
        output = kept(ids(), output_hidden_states=True)
        assert same(output, expected)
        output.hidden_states[-1].fill_(3.0)
        assert torch.equal(output.last_hidden_state, output.hidden_states[-1])
    assert kept.runs == 1


def _each(kind, change):
    """Change every module of a class."""

    def change_all(encoder):
        for module in encoder.modules():
            if isinstance(module, kind):
                change(module)

    return change_all


def _grow(encoder):
    encoder.resize_token_embeddings(encoder.config.vocab_size + 1)
    encoder.get_input_embeddings().weight.data[5] = 1.0


def _replace_a_layer(encoder):
    layers = next(module for module in encoder.modules() if isinstance(module, nn.ModuleList))
    layers[0] = layers[1]


def _replace_activations(encoder):
    for module in encoder.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = nn.ReLU().eval()


def _doubled(encoder):
    return {name: 2 * weight for name, weight in encoder.state_dict().items() if "ids" not in name}


CHANGES = {
    "write": lambda encoder: encoder.get_input_embeddings().weight[5].add_(1),
    "write behind autograd": lambda encoder: next(encoder.parameters()).data.mul_(1.5),
    "merge": _each(nn.Linear, lambda layer: layer.weight.data.add_(0.05 * torch.randn_like(layer.weight))),
    "round": lambda encoder: encoder.to(torch.bfloat16).to(torch.float32),
    "load": lambda encoder: encoder.load_state_dict(_doubled(encoder)),
    "assign": lambda encoder: setattr(
        encoder.get_input_embeddings(), "weight", nn.Parameter(2 * encoder.get_input_embeddings().weight)
    ),
    "grow": _grow,
    "layer": _replace_a_layer,
    "activation": _replace_activations,
    "method": lambda encoder: setattr(encoder.encoder.layers[0].self_attn, "project", lambda x: x),
    "number": _each(nn.LayerNorm, lambda norm: setattr(norm, "eps", 0.1)),
    "attention": lambda encoder: encoder.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("is_offloaded", [False, True], ids=["in-place", "offloaded"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_encoder_runs(change, is_offloaded, kept):
    if is_offloaded:
        cpu_offload_with_hook(kept.encoder, execution_device="cpu")
    kept(ids())
    change(kept.encoder)
    output = kept(ids())
    assert kept.runs == 2
    assert same(output, kept.plain(ids()))
    kept(ids())
    assert kept.runs == 2


def lora(encoder, name="x"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        encoder.add_adapter(config, adapter_name=name)
        encoder.eval()


def test_loras_count(kept):
    """Loaded, scaled, switched off and on, and deleted; another call with the same LoRA is kept."""
    layers = lambda: [module for module in kept.encoder.modules() if hasattr(module, "merged_adapters")]  # noqa: E731
    steps = [
        lambda: lora(kept.encoder),
        lambda: [module.set_scale("x", 0.3) for module in layers()],
        lambda: kept.encoder.disable_adapters(),
        lambda: kept.encoder.enable_adapters(),
        lambda: [module.merge() for module in layers()],
        lambda: [module.unmerge() for module in layers()],
        lambda: kept.encoder.delete_adapter("x"),
    ]
    kept(ids())
    for number, step in enumerate(steps, 2):
        step()
        for _ in range(2):
            assert same(kept(ids()), kept.plain(ids()))
            assert kept.runs == number


def test_a_lora_that_was_fused_and_unloaded_counts():
    """Between two calls: the base weights have changed, and no counter of theirs."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact")
    tiny_output(pipe, "flux", steps=1)
    generator, state = torch.Generator().manual_seed(0), {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            prefix = f"text_encoder.text_model.encoder.layers.{layer}.self_attn.{name}"
            state[f"{prefix}.lora_A.weight"] = torch.randn(4, encoders.FEATURES, generator=generator)
            state[f"{prefix}.lora_B.weight"] = torch.randn(encoders.FEATURES, 4, generator=generator)
    pipe.load_lora_weights(state)
    pipe.fuse_lora(components=["text_encoder"])
    pipe.unload_lora_weights()
    output = tiny_output(pipe, "flux", steps=1)
    assert pipe.dit_accel.report().encoding == "1 of 2 kept from earlier calls"
    assert torch.equal(tiny_output(restore_pipeline(pipe), "flux", steps=1), output)


def test_settings_of_torch_count(kept):
    """Autocast and the kernels of attention."""
    kept(ids())
    with torch.autocast("cpu", torch.bfloat16):
        assert same(kept(ids()), kept.plain(ids()))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert same(kept(ids()), kept.plain(ids()))
    assert kept.runs == 3


class Doubled(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def _replace_the_forward(encoder):
    forward = encoder.forward
    encoder.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def _replace_an_offloaded_forward(encoder):
    _replace_the_forward(encoder)
    cpu_offload_with_hook(encoder, execution_device="cpu")


def _wrap_a_layer(encoder):
    for module in list(encoder.modules()):
        if hasattr(module, "fc1"):
            module.fc1 = Doubled(module.fc1).eval()


TRAINING, HOOKED, FORWARD = "is in training mode", "has a forward hook", "has a forward of its own"
REASONS = {
    "train": (lambda encoder: encoder.train(), TRAINING),
    "train a part": (lambda encoder: list(encoder.modules())[-1].train(), TRAINING),
    "hook": (lambda encoder: encoder.register_forward_hook(lambda *_: None), HOOKED),
    "hook a part": (lambda encoder: list(encoder.modules())[-1].register_forward_pre_hook(lambda *_: None), HOOKED),
    "forward": (_replace_the_forward, FORWARD),
    "forward, offloaded": (_replace_an_offloaded_forward, FORWARD),
    "wrap a layer": (_wrap_a_layer, "Doubled is not code of a known package"),
    "lose a weight": (
        lambda encoder: setattr(encoder, "unused", nn.Linear(1, 1, device="meta").eval()),
        "Linear has its weight on device 'meta'",
    ),
}


@pytest.mark.parametrize(("change", "reason"), REASONS.values(), ids=REASONS)
def test_an_encoder_that_is_not_known_runs(change, reason, kept):
    """In every call, and the remark says why."""
    change(kept.encoder)
    for number in (1, 2):
        kept(ids())
        assert kept.runs == number
    assert reason in kept.stage.remark


def test_a_hook_for_one_call_sees_it():
    """As pipelines add one to read or change a layer; the calls without it are kept."""
    kept, seen = Kept(encoder_of()), []
    expected = kept(ids())
    hook = kept.encoder.final_layer_norm.register_forward_hook(lambda _, args, output: seen.append(0) or args[0])
    assert not same(kept(ids()), expected) and seen == [0]
    hook.remove()
    assert same(kept(ids()), expected) and kept.runs == 2


def test_calls_that_are_watched_run(kept):
    kept(ids())
    undo = nn.modules.module.register_module_forward_hook(lambda *_: None)
    kept(ids())
    undo.remove()
    with FlopCounterMode(display=False) as counter:
        kept(ids())
    assert kept.runs == 3 and counter.get_total_flops() > 0


def test_inputs_that_may_change_or_are_large_are_not_compared(monkeypatch):
    kept = Kept(encoder_of("llama"))
    cache = kept(ids()).past_key_values
    kept(ids(length=1), past_key_values=cache)
    assert kept.runs == 2 and "an input is a DynamicCache" in kept.stage.remark
    monkeypatch.setattr("dit_accel.stages.prompts.MOST_INPUT", 100)
    kept(ids(3))
    kept(ids(3))
    assert kept.runs == 4 and "its inputs have more than" in kept.stage.remark


def test_gradients_flow(kept):
    kept(ids())
    with torch.enable_grad():
        kept(ids()).last_hidden_state.sum().backward()
    assert kept.encoder.get_input_embeddings().weight.grad.abs().sum() > 0
    assert "gradients are on" in kept.stage.remark


def test_inference_mode_is_as_without(kept):
    with torch.inference_mode():
        kept(ids())
    with torch.no_grad():
        output = kept(ids()).last_hidden_state
        assert kept.runs == 1 and not output.is_inference()
        assert torch.equal(output, kept.plain(ids()).last_hidden_state)


def test_memory_is_bounded():
    """The least recently used output goes first, and one that is too large is never kept."""
    kept = Kept(encoder_of("t5"))
    kept(ids())
    store = kept.stage._store
    size = store.size
    store.most = 3 * size
    for seed in (1, 2, 0, 3):  # 1 is the oldest when 3 comes
        kept(ids(seed))
    assert store.size == 3 * size and kept.runs == 4
    kept(ids(0)), kept(ids(2)), kept(ids(3))
    assert kept.runs == 4
    kept(ids(1))
    assert kept.runs == 5
    store.most = size - 1
    kept(ids(4))
    assert kept.runs == 6 and "more than stages.prompts_mib allows" in kept.stage.remark


@pytest.mark.parametrize(
    ("sizes", "most", "kept"),
    [([4, 4, 2], 10, "abc"), ([4, 4, 3], 10, "bc"), ([3, 3, 3, 10], 10, "d"), ([3, 3, 3, 8], 10, "d"), ([1], 0, "")],
    ids=["exactly", "one", "several for one", "several for less", "none"],
)
def test_as_many_outputs_go_as_needed(sizes, most, kept):
    """The bound holds after each output, whatever its size, and what fits exactly stays."""
    store = PromptStore(most)
    for key, size in zip("abcd", sizes, strict=False):
        store.put((key,), None, size)
        assert store.size <= most
    assert "".join(key for (key,) in store._kept) == kept


class Scaled(nn.Module):
    """An encoder that adds its inputs up, and may write to the second."""

    writes = False

    def forward(self, first, second):
        output = first + 10 * second
        if self.writes:
            second += 1
        return output


Scaled.__module__ = "torch.nn"  # otherwise its code is not known
Scaled.forward = FunctionType(Scaled.forward.__code__, {"__name__": "torch.nn"})


def test_each_of_several_inputs_counts(monkeypatch):
    """Its values, dtype, bytes and writes: the output of an encoder that writes to one is not kept."""
    kept, ones = Kept(Scaled().eval()), torch.ones(4)
    for number, (first, second) in enumerate([(ones, ones), (2 * ones, ones), (ones, 2 * ones), (ones, ones)], 1):
        assert torch.equal(kept(first, second), first + 10 * second) and kept.runs == min(number, 3)
    whole = ones.view(torch.int32)  # the same bytes
    assert torch.equal(kept(whole, whole), 11 * whole) and kept.runs == 4
    monkeypatch.setattr("dit_accel.stages.prompts.MOST_INPUT", 2 * ones.nbytes)
    kept(ones, ones)
    assert kept.runs == 4
    monkeypatch.setattr("dit_accel.stages.prompts.MOST_INPUT", 2 * ones.nbytes - 1)
    kept(ones, ones)
    assert kept.runs == 5 and "its inputs have more than" in kept.stage.remark
    monkeypatch.undo()
    kept.encoder.writes = True
    for number in (6, 7):
        assert torch.equal(kept(ones, ones.clone()), 11 * ones) and kept.runs == number
        assert "it writes to its inputs" in kept.stage.remark and kept.stage.size == 0


def test_what_is_closed_or_forgotten_frees_the_outputs_of_all_encoders():
    """A stage that is closed twice, or forgets and goes on, is as good as new."""
    encoders = encoder_of(), encoder_of("t5")
    pipe = Pipe(*encoders)
    stage = KeptPrompts(pipe, CallParts(), MEBIBYTE)
    for end in (stage.forget, stage.close, stage.close):
        expected = [encoder(ids()) for encoder in encoders]
        assert (stage.size > 0) == (end is stage.forget or ENTRY in vars(encoders[0]))
        end()
        assert stage.size == 0
        assert all(same(encoder(ids()), item) for encoder, item in zip(encoders, expected, strict=True))
    assert not any(ENTRY in vars(encoder) for encoder in encoders)
    again = KeptPrompts(pipe, CallParts(), MEBIBYTE)
    [encoder(ids()) for encoder in encoders]
    assert again.size > 0 and again.remark == "0 of 2 kept from earlier calls"


def test_an_error_leaves_nothing():
    kept = Kept(encoder_of("t5"))
    with pytest.raises(IndexError):
        kept(ids() + 10_000)
    assert not kept.stage._store.size
    assert same(kept(ids()), kept.plain(ids()))


def test_no_memory_for_a_copy_costs_no_output(monkeypatch, kept):
    expected = kept.plain(ids())
    kept(ids(1))
    monkeypatch.setattr("dit_accel.stages.prompts._copied", lambda *_: 1 / 0)
    for seed in (0, 1):
        assert same(kept(ids(seed)), kept.plain(ids(seed)))
    assert same(kept(ids()), expected) and "raised ZeroDivisionError" in kept.stage.remark


def test_threads_get_their_own_prompts():
    kept, wrong = Kept(encoder_of("t5")), []
    expected = {seed: kept.plain(ids(seed)) for seed in range(4)}

    @torch.no_grad()
    def encode(first):
        for step in range(40):
            seed = (first + step) % 4
            if not same(kept(ids(seed)), expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=encode, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and kept.runs < 20


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda encoder: pickle.loads(pickle.dumps(encoder))], ids=["copy", "pickle"]
)
def test_a_copy_encodes_by_itself(way):
    encoder = encoder_of("t5")
    stage = KeptPrompts(pipe := Pipe(encoder), CallParts(), MEBIBYTE)
    expected = encoder(ids())
    copied = way(encoder)
    assert ENTRY not in vars(copied)
    for weight in copied.parameters():
        weight.zero_()
    assert not copied(ids()).last_hidden_state.any()
    assert same(encoder(ids()), expected) and stage.remark == "1 of 2 kept from earlier calls" and pipe


def test_a_compiled_encoder_keeps_its_entry():
    """Compiled before: its outputs are kept. Compiled later: it runs compiled code, and nothing of ours is left."""
    encoder = encoder_of()
    encoder.compile(backend="eager")
    entry = vars(encoder)[ENTRY]
    expected = encoder(ids())
    kept = Kept(encoder)
    assert same(kept(ids()), expected) and same(kept(ids()), expected)
    assert kept.stage.remark == "1 of 2 kept from earlier calls"
    kept.stage.close()
    assert vars(encoder)[ENTRY] is entry
    kept = Kept(encoder_of())
    kept.encoder.compile(backend="eager")
    entry = vars(kept.encoder)[ENTRY]
    assert same(kept(ids()), expected) and "was replaced or compiled" in kept.stage.remark
    kept.stage.close()
    assert vars(kept.encoder)[ENTRY] is entry


def test_compiled_callers_see_the_encoders_own_code():
    kept, nodes = Kept(encoder_of("t5")), []

    def count(graph, _):
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    expected = kept.plain(ids()).last_hidden_state
    del kept.encoder._call_impl
    compiled = torch.compile(lambda values: kept.encoder(values).last_hidden_state + 0, backend=count)
    assert torch.equal(compiled(ids()), expected) and sum(nodes) > 20
    assert kept.stage.remark is None


def moving(encoder, moves, name):
    """Give the encoder new memory each time that it is moved."""

    def to(*args, **kwargs):
        moves.append(name)
        for weight in encoder.parameters():
            weight.data = weight.data.clone()
        return encoder

    encoder.to = to


def test_an_offloaded_encoder_is_not_moved():
    """A kept output moves the previous model away, as accelerate does, and leaves the encoder where it is."""
    moves = []
    first, second = Kept(encoder_of()), Kept(encoder_of("t5"))
    moving(first.encoder, moves, "first"), moving(second.encoder, moves, "second")
    _, hook = cpu_offload_with_hook(first.encoder, execution_device="cpu")
    cpu_offload_with_hook(second.encoder, execution_device="cpu", prev_module_hook=hook)
    expected = first(ids()), second(ids())
    del moves[:]
    for _ in range(2):
        assert same(first(ids()), expected[0]) and moves == []
        assert same(second(ids()), expected[1]) and moves == ["first"]
        del moves[:]
    assert (first.runs, second.runs) == (1, 1)
    first(ids(1))
    assert moves == ["first"]


@pytest.mark.parametrize("kind", ["clip", "llama"])
def test_weights_that_are_offloaded_one_by_one_count(kind):
    """Between calls they are on device meta, and accelerate has them."""
    kept = Kept(encoder_of(kind))
    weights = {name: weight.clone() for name, weight in kept.encoder.state_dict().items()}
    cpu_offload(kept.encoder, execution_device="cpu", state_dict=weights)
    assert next(kept.encoder.parameters()).is_meta
    expected = kept(ids())
    assert same(kept(ids()), expected) and kept.runs == 1
    weights["norm.weight" if kind == "llama" else next(name for name in weights if "final" in name)] *= 2
    output = kept(ids())
    assert kept.runs == 2 and not same(output, expected)


@pytest.mark.parametrize("is_offloaded", [False, True], ids=["plain", "model-offload"])
@pytest.mark.parametrize("name", ["flux", "sd3", "qwen-image", "hunyuan"])
def test_a_pipeline_encodes_a_prompt_once(name, is_offloaded):
    """Bit for bit, with and without offloading; nothing is left once it is restored."""
    pipe = tiny_pipeline(name)
    plain = tiny_output(pipe, name, steps=1)
    if is_offloaded:
        pipe.enable_model_cpu_offload(device=torch.device("cpu"))
    accelerate_pipeline(pipe, "exact")
    for place in range(3):
        assert torch.equal(tiny_output(pipe, name, steps=1), plain)
        kept, _, calls, *rest = pipe.dit_accel.report().encoding.split()
        assert rest == ["kept", "from", "earlier", "calls"]
        assert kept == ("0" if place == 0 else calls)
    pipe.dit_accel.reset()
    tiny_output(pipe, name, steps=1)
    assert pipe.dit_accel.report().encoding.startswith("0 of")
    restore_pipeline(pipe)
    assert not any(ENTRY in vars(item) for item in pipe.components.values() if isinstance(item, nn.Module))
    assert torch.equal(tiny_output(pipe, name, steps=1), plain)


def test_a_negative_prompt_is_encoded_once():
    """For all prompts, and a batch is another prompt than its parts."""
    pipe = accelerate_pipeline(tiny_pipeline("sd3"), "exact")
    plain = tiny_pipeline("sd3")
    for prompt, kept in (("a fox", 0), ("a whale", 3), (["a fox", "a whale"], 0), (["a fox", "a whale"], 6)):
        values = {"prompt": prompt, "guidance_scale": 3.0, "negative_prompt": "blurry"}
        if isinstance(prompt, list):
            values["negative_prompt"] = ["blurry"] * 2
        assert equal_up_to_rounding(
            tiny_output(pipe, "sd3", steps=1, **values), tiny_output(plain, "sd3", steps=1, **values)
        )
        assert pipe.dit_accel.report().encoding == f"{kept} of 6 kept from earlier calls"


def test_embeddings_that_are_given_need_no_encoder():
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact")
    tiny_output(pipe, "flux", steps=1)
    embeddings, pooled, _ = pipe.encode_prompt("a fox", "a fox")
    values = {**tiny_inputs("flux", steps=1), "prompt": None, "prompt_embeds": embeddings}
    pipe(**values, pooled_prompt_embeds=pooled)
    assert pipe.dit_accel.report().encoding is None


def test_a_swapped_encoder_is_used_and_named():
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact")
    other = tiny_pipeline("flux", seed=1)
    tiny_output(pipe, "flux", steps=1)
    pipe.text_encoder = other.text_encoder
    output = tiny_output(pipe, "flux", steps=1)
    assert "pipe.text_encoder was replaced" in pipe.dit_accel.report().encoding
    assert torch.equal(tiny_output(restore_pipeline(pipe), "flux", steps=1), output)


def test_pipelines_may_share_an_encoder():
    """They share its outputs, and the last of them restores it, in either order."""
    for last in (0, 1):
        pipes = tiny_pipeline("flux"), tiny_pipeline("flux")
        pipes[1].text_encoder = pipes[0].text_encoder
        for pipe in pipes:
            accelerate_pipeline(pipe, "exact")
        outputs = [tiny_output(pipe, "flux", steps=1) for pipe in pipes]
        assert equal_up_to_rounding(*outputs)
        assert pipes[1].dit_accel.report().encoding == "1 of 2 kept from earlier calls"
        entry = vars(pipes[0].text_encoder)[ENTRY]
        restore_pipeline(pipes[1 - last])
        assert vars(pipes[0].text_encoder)[ENTRY] is entry
        assert equal_up_to_rounding(tiny_output(pipes[last], "flux", steps=1), outputs[0])
        assert pipes[last].dit_accel.report().encoding == "2 of 2 kept from earlier calls"
        restore_pipeline(pipes[last])
        assert ENTRY not in vars(pipes[0].text_encoder)


def test_an_encoder_outlives_its_pipeline():
    """It then runs as ever, and no weight is kept alive."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact")
    tiny_output(pipe, "flux", steps=1)
    encoder, reference = pipe.text_encoder, weakref.ref(pipe.text_encoder_2)
    del pipe
    gc.collect()
    assert reference() is None
    encoder(ids())
    assert ENTRY not in vars(encoder)


def test_one_key_switches_it_off():
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", **{"stages.prompts": False})
    assert ENTRY not in vars(pipe.text_encoder)
    assert "stages.prompts is false" in str(pipe.dit_accel.report())
