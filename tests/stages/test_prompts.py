"""Kept embeddings equal the encoder's bit for bit, and a change of anything that counts makes new ones."""

import copy
import functools
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from peft import LoraConfig
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.loop.timing import CallParts
from dit_accel.stages.prompts import ENTRY, KeptPrompts, PromptStore, _copied
from tests.rounding import equal_up_to_rounding
from tests.tiny import encoders, tiny_inputs, tiny_output, tiny_pipeline

MEBIBYTE = 2**20
ENCODERS = {"clip": encoders.clip, "t5": encoders.t5, "llama": encoders.llama, "qwen": encoders.qwen}


class Pipe:
    def __init__(self, *encoders):
        vars(self).update({f"text_encoder_{place}": encoder for place, encoder in enumerate(encoders)})


class Kept:
    """An encoder with the stage on it, and the number of times that it really ran."""

    def __init__(self, encoder):
        self.encoder, self.runs = encoder, 0
        self.pipe, self.parts = Pipe(encoder), CallParts()
        self.stage = KeptPrompts(self.pipe, self.parts, MEBIBYTE)
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
    parts = output if isinstance(output, list | tuple) else output.to_tuple()
    return [tensor for part in parts for tensor in tensors_of(part)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_known_input_runs_no_encoder(kind):
    """Outputs have the same class, fields, strides and bits, with hidden states and caches, and may be written to."""
    kept = Kept(encoder_of(kind))
    expected = kept.plain(ids(), output_hidden_states=True)
    for _ in range(3):
        output = kept(ids(), output_hidden_states=True)
        assert type(output) is type(expected) and list(output.keys()) == list(expected.keys())
        assert same(output, expected)
        assert [item.stride() for item in tensors_of(output)] == [item.stride() for item in tensors_of(expected)]
        assert len({*map(id, tensors_of(output))}) == len({*map(id, tensors_of(expected))})  # last hidden states
        for tensor in tensors_of(output):
            tensor.fill_(3.0)
    assert kept.runs == 1


def test_a_view_stays_a_view_with_its_strides(kept):
    """Contiguous copies may be rounded differently in later layers, and take memory twice."""
    whole, (entry,) = torch.randn(2, 9, 8), kept.stage._entries.values()
    output = {"whole": whole, "first": whole[:, 0], "even": whole[..., ::2]}
    assert entry._keep((entry,), output, on_host=True) is None and entry.store.size == whole.nbytes
    copied, _ = _copied(*entry.store.get((entry,)))
    assert all(torch.equal(copied[name], item) for name, item in output.items())
    assert [item.stride() for item in copied.values()] == [item.stride() for item in output.values()]
    copied["whole"].zero_()
    assert not copied["first"].any() and not copied["even"].any() and whole.all()


def test_every_input_counts(kept):
    """Ids, masks, dtypes, names and flags are compared by value."""
    masks = [torch.ones_like(ids()), torch.ones_like(ids()).tril()]
    calls = [((values,), {}) for values in (ids(), ids(1), ids(length=8), ids().int())]
    calls += [((), {"input_ids": ids()}), ((ids(),), {"output_hidden_states": True})]
    calls += [((ids(),), {"attention_mask": mask}) for mask in masks]
    for number, (args, kwargs) in enumerate(calls + calls, 1):
        assert same(kept(*args, **kwargs), kept.plain(*args, **kwargs)) and kept.runs == min(number, len(calls))


class Doubled(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def _modules(kind, change):
    return lambda encoder: [change(module) for module in list(encoder.modules()) if isinstance(module, kind)]


def _last(change):
    return lambda encoder: change(list(encoder.modules())[-1])


def _grow(encoder):
    encoder.resize_token_embeddings(encoder.config.vocab_size + 1)
    encoder.get_input_embeddings().weight.data[5] = 1.0


def _double(encoder):
    embeddings = encoder.get_input_embeddings()
    embeddings.weight = nn.Parameter(2 * embeddings.weight)


def _doubled(encoder):
    return {name: 2 * weight for name, weight in encoder.state_dict().items() if "ids" not in name}


def _set_in_mlp(name, make):
    def change(encoder):
        mlp = encoder.encoder.layers[0].mlp
        setattr(mlp, name, make(getattr(mlp, name)).eval())

    return change


TRAINING, HOOKED, FORWARD = "is in training mode", "has a forward hook", "has a forward of its own"
CHANGES = {  # and why no output of the changed encoder is kept
    "write": (lambda encoder: encoder.get_input_embeddings().weight[5].add_(1), None),
    "write behind autograd": (lambda encoder: next(encoder.parameters()).data.mul_(1.5), None),
    "merge": (_modules(nn.Linear, lambda layer: layer.weight.data.add_(0.05 * torch.randn_like(layer.weight))), None),
    "round": (lambda encoder: encoder.to(torch.bfloat16).to(torch.float32), None),
    "load": (lambda encoder: encoder.load_state_dict(_doubled(encoder)), None),
    "assign": (_double, None),
    "grow": (_grow, None),
    "layer": (lambda encoder: setattr(encoder.encoder.layers, "0", encoder.encoder.layers[1]), None),
    "activation": (_set_in_mlp("activation_fn", lambda _: nn.ReLU()), None),
    "method": (lambda encoder: setattr(encoder.encoder.layers[0].self_attn, "project", lambda x: x), None),
    "number": (_modules(nn.LayerNorm, lambda norm: setattr(norm, "eps", 0.1)), None),
    "attention": (lambda encoder: encoder.set_attn_implementation("eager"), None),
    "train a part": (_last(lambda part: part.train()), TRAINING),
    "hook": (lambda encoder: encoder.register_forward_hook(functools.partial(print, end="")), HOOKED),
    "hook of arguments": (_last(lambda part: part.register_forward_hook(lambda *args: args[2])), None),
    "hook a part": (_last(lambda part: part.register_forward_pre_hook(lambda *_: None)), HOOKED),
    "forward": (lambda encoder: setattr(encoder, "forward", functools.partial(encoder.forward)), FORWARD),
    "wrap a layer": (_set_in_mlp("fc1", Doubled), "Doubled is not code of a known package"),
    "lose a weight": (
        lambda encoder: setattr(encoder, "unused", nn.Linear(1, 1, device="meta").eval()),
        "Linear has its weight on device 'meta'",
    ),
}


@pytest.mark.parametrize("is_offloaded", [False, True], ids=["in-place", "offloaded"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_encoder_runs(name, is_offloaded, kept):
    """Once, or in every call if it is not known."""
    change, reason = CHANGES[name]
    if is_offloaded and reason is None:
        cpu_offload_with_hook(kept.encoder, execution_device="cpu")
    kept(ids())
    change(kept.encoder)
    if is_offloaded and reason == FORWARD:
        cpu_offload_with_hook(kept.encoder, execution_device="cpu")
    assert same(kept(ids()), kept.plain(ids())) and kept.runs == 2
    kept(ids())
    assert kept.runs == (2 if reason is None else 3) and (reason or "of 3 kept") in kept.stage.remark


def test_loras_count(kept):
    """Loaded, scaled, switched off and on, merged and deleted; another call with the same LoRA is kept."""
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def layers():
        return [module for module in kept.encoder.modules() if hasattr(module, "merged_adapters")]

    steps = [
        lambda: (kept.encoder.add_adapter(config, adapter_name="x"), kept.encoder.eval()),
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
            assert same(kept(ids()), kept.plain(ids())) and kept.runs == number


class Watched:
    """Context in which torch watches all calls of modules."""

    def __enter__(self):
        self._hook = nn.modules.module.register_module_forward_hook(lambda *_: None)

    def __exit__(self, *_):
        self._hook.remove()


WATCHED = "torch watches all modules or operations"
MODES = {  # context, number of runs of the encoder, and why the output is not kept
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), 2, ""),
    "attention": (lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), 2, ""),
    "inference": (torch.inference_mode, 1, ""),
    "gradients": (torch.enable_grad, 2, "gradients are on"),
    "operations are watched": (lambda: FlopCounterMode(display=False), 2, WATCHED),
    "modules are watched": (Watched, 2, WATCHED),
}


@pytest.mark.parametrize(("mode", "runs", "reason"), MODES.values(), ids=MODES)
def test_modes_of_torch(mode, runs, reason, kept):
    """An encoder runs where its output could differ; gradients flow, and no output stays in inference mode."""
    with mode():
        output = kept(ids()).last_hidden_state
        assert torch.equal(output, kept.plain(ids()).last_hidden_state)
    assert output.requires_grad == (mode is torch.enable_grad)
    output = kept(ids()).last_hidden_state
    assert torch.equal(output, kept.plain(ids()).last_hidden_state) and not output.is_inference()
    assert kept.runs == runs and reason in kept.stage.remark


def test_inputs_that_may_change_are_not_compared():
    kept = Kept(encoder_of("llama"))
    cache = kept(ids()).past_key_values
    kept(ids(length=1), past_key_values=cache)
    assert kept.runs == 2 and "an input is a DynamicCache" in kept.stage.remark


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        ("a4 b4 c2", "abc"),
        ("a4 b4 c3", "bc"),
        ("a4 b4 a c3", "ac"),
        ("a3 b3 c3 d10", "d"),
        ("a3 b3 c3 d8", "d"),
        ("a4 b11", ""),
    ],
)
def test_memory_is_bounded(calls, left):
    """At most 10 bytes stay after each output; the least recently kept or used goes first."""
    store = PromptStore(10)
    for key, *digits in calls.split():
        if digits:
            store.put((key,), None, int("".join(digits)))
        else:
            store.get((key,))
        assert store.size <= store.most
    assert {key for (key,) in store._kept} == set(left)


def test_an_output_that_is_too_large_is_not_kept(kept):
    kept.stage._store.most = 1
    kept(ids()), kept(ids())
    assert kept.runs == 2 and "more than stages.prompts_mib allows" in kept.stage.remark


class Scaled(nn.Module):
    """An encoder that adds its inputs up, and may write to the second, or draw its output."""

    writes = draws = False

    def forward(self, first, second):
        output = first + 10 * second
        if self.writes:
            second += 1
        return output.uniform_() if self.draws else output


Scaled.__module__ = "torch.nn"  # otherwise its code is not known
Scaled.forward = FunctionType(Scaled.forward.__code__, {"__name__": "torch.nn"})


def test_each_of_several_inputs_counts(monkeypatch):
    """Its values, dtype, bytes and writes: the output of an encoder that writes to one is not kept."""
    kept, ones = Kept(Scaled().eval()), torch.ones(4)
    for number, (first, second) in enumerate([(ones, ones), (2 * ones, ones), (ones, 2 * ones), (ones, ones)], 1):
        assert torch.equal(kept(first, second), first + 10 * second) and kept.runs == min(number, 3)
    whole = ones.view(torch.int32)  # the same bytes
    assert torch.equal(kept(whole, whole), 11 * whole) and kept.runs == 4
    for most, runs in ((2 * ones.nbytes, 4), (2 * ones.nbytes - 1, 5)):
        monkeypatch.setattr("dit_accel.stages.prompts.MOST_INPUT", most)
        kept(ones, ones)
        assert kept.runs == runs
    assert "its inputs have more than" in kept.stage.remark
    monkeypatch.undo()
    kept.encoder.writes = True
    for number in (6, 7):
        assert torch.equal(kept(ones, ones.clone()), 11 * ones) and kept.runs == number
        assert "it writes to its inputs" in kept.stage.remark and kept.stage._store.size == 0
    kept.encoder.writes, kept.encoder.draws = False, True
    assert not torch.equal(kept(ones, ones), kept(ones, ones)) and "it draws random numbers" in kept.stage.remark


def test_what_is_closed_or_forgotten_frees_the_outputs_of_all_encoders():
    """A stage that is closed twice, or forgets and goes on, is as good as new."""
    encoders = encoder_of(), encoder_of("t5")
    pipe = Pipe(*encoders)
    stage = KeptPrompts(pipe, CallParts(), MEBIBYTE)
    for end in (stage.forget, stage.close, stage.close):
        expected = [encoder(ids()) for encoder in encoders]
        assert (stage._store.size > 0) == (end is stage.forget or ENTRY in vars(encoders[0]))
        end()
        assert stage._store.size == 0
        assert all(same(encoder(ids()), item) for encoder, item in zip(encoders, expected, strict=True))
    assert not any(ENTRY in vars(encoder) for encoder in encoders)
    again = KeptPrompts(pipe, CallParts(), MEBIBYTE)
    [encoder(ids()) for encoder in encoders]
    assert again._store.size > 0 and again.remark == "0 of 2 kept from earlier calls"


def test_no_memory_for_a_copy_costs_no_output(monkeypatch, kept):
    expected = kept.plain(ids())
    kept(ids(1))
    monkeypatch.setattr("dit_accel.stages.prompts._copied", lambda *_: 1 / 0)
    for seed in (0, 1):
        assert same(kept(ids(seed)), kept.plain(ids(seed)))
    assert same(kept(ids()), expected) and "raised ZeroDivisionError" in kept.stage.remark


def test_threads_get_their_own_prompts():
    kept = Kept(encoder_of("t5"))
    expected = {seed: kept.plain(ids(seed)) for seed in range(4)}

    @torch.no_grad()
    def is_right(step):
        return same(kept(ids(step % 4)), expected[step % 4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(160))) and kept.runs < 20


@pytest.mark.parametrize("way", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))], ids=["copy", "pickle"])
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


@pytest.mark.parametrize("is_before, runs, remark", [(True, 1, "1 of 2 kept"), (False, 2, "was replaced or compiled")])
def test_a_compiled_encoder_keeps_its_entry(is_before, runs, remark):
    """Compiled before: its outputs are kept. Compiled later: it runs compiled code, and nothing of ours is left."""
    encoder, calls = encoder_of(), []

    def compiled(*args):
        calls.append(args)
        return encoder._call_impl(*args)

    vars(encoder)[ENTRY] = compiled if is_before else None
    stage = KeptPrompts(pipe := Pipe(encoder), CallParts(), MEBIBYTE)
    if not is_before:
        vars(encoder)[ENTRY] = compiled
    assert same(encoder(ids()), encoder(ids())) and len(calls) == runs
    assert remark in stage.remark and pipe
    stage.close()
    assert vars(encoder)[ENTRY] is compiled


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


@pytest.mark.parametrize("kind, name", [("clip", "final_layer_norm.weight"), ("llama", "norm.weight")])
def test_weights_that_are_offloaded_one_by_one_count(kind, name):
    """Between calls they are on device meta, and accelerate has them."""
    kept = Kept(encoder_of(kind))
    weights = {name: weight.clone() for name, weight in kept.encoder.state_dict().items()}
    cpu_offload(kept.encoder, execution_device="cpu", state_dict=weights)
    assert next(kept.encoder.parameters()).is_meta
    expected = kept(ids())
    assert same(kept(ids()), expected) and kept.runs == 1
    weights[next(item for item in weights if item.endswith(name))] *= 2
    assert not same(kept(ids()), expected) and kept.runs == 2


@pytest.mark.parametrize(
    ("name", "is_offloaded"),
    [("sd3", False), ("qwen-image", True), ("hunyuan", False), ("flux-kontext", True), ("wan-i2v-clip", False)],
)
def test_a_pipeline_encodes_a_prompt_and_an_image_once(name, is_offloaded):
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
    modules = [item for item in pipe.components.values() if isinstance(item, nn.Module)]
    assert not any({ENTRY, "encode"} & vars(item).keys() for item in modules)
    assert torch.equal(tiny_output(pipe, name, steps=1), plain)


def test_a_kept_image_changes_no_sample():
    """Each seed draws its own from the kept distribution; another image, dtype, tiling or weight counts."""
    pipe = tiny_pipeline("flux-img2img")
    one, other = torch.rand(2, 1, 3, 96, 88, generator=torch.Generator())
    calls = [(one, 1, False), (one, 2, False), (other, 1, False), (one, 2, False), (one, 2, True)]

    def call(image, seed, tiled):
        pipe.vae.use_tiling, pipe.vae.tile_sample_min_size = tiled, 64
        pipe.vae.tile_latent_min_size = 64 // pipe.vae_scale_factor
        changes = {"image": image, "strength": 0.5, "generator": torch.Generator().manual_seed(seed)}
        return pipe(**tiny_inputs("flux-img2img", steps=2) | changes).images

    plain = [call(*each) for each in calls]
    assert not any(torch.equal(plain[1], plain[place]) for place in (0, 2, 4))
    accelerate_pipeline(pipe, "exact")
    assert all(torch.equal(call(*each), expected) for each, expected in zip(calls, plain, strict=True))
    with torch.no_grad():
        pipe.vae.encoder.conv_out.bias += 1
    changed = call(one, 2, False)
    assert pipe.dit_accel.report().encoding == "2 of 3 kept from earlier calls"
    pipe.vae._encode = lambda *args: type(pipe.vae)._encode(pipe.vae, *args)  # whose state is not known
    call(one, 2, False)
    assert "its encode is not its class's own" in pipe.dit_accel.report().encoding
    restore_pipeline(pipe)
    assert torch.equal(call(one, 2, False), changed) and not torch.equal(changed, plain[1])


def test_calls_without_the_stage_say_so():
    """A call with embeddings encodes nothing, an encoder may be replaced, and a key of the preset switches it off."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact")
    tiny_output(pipe, "flux", steps=1)
    embeddings, pooled, _ = pipe.encode_prompt("a fox", "a fox")
    pipe(**{**tiny_inputs("flux", steps=1), "prompt": None, "prompt_embeds": embeddings}, pooled_prompt_embeds=pooled)
    assert pipe.dit_accel.report().encoding is None
    pipe.text_encoder = tiny_pipeline("flux", seed=1).text_encoder
    output = tiny_output(pipe, "flux", steps=1)
    assert "pipe.text_encoder was replaced" in pipe.dit_accel.report().encoding
    accelerate_pipeline(pipe, "exact", **{"stages.prompts": False})
    assert ENTRY not in vars(pipe.text_encoder) and "stages.prompts is false" in str(pipe.dit_accel.report())
    assert torch.equal(tiny_output(pipe, "flux", steps=1), output)


@pytest.mark.parametrize("last", [0, 1])
def test_pipelines_may_share_an_encoder(last):
    """They share its outputs, and the last of them restores it, in either order."""
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
