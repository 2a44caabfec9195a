"""Layers in 8 bits whose original weights wait on the host; a meta device stands for the GPU."""

import re
import weakref

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading
from torch import nn

from dit_accel import accelerate_pipeline, accelerated, load_preset, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models.beside import host_weights, linear_trial, quantized_linears
from dit_accel.models.beside.host_weights import HostWeight
from dit_accel.models.beside.quantized_linears import LEAST_ROWS, MODULATION, QuantizedLinears, block_linears
from dit_accel.models.free_memory import FreeMemory
from dit_accel.models.graphs.limits import why_not_module
from tests.models.test_quantized_linears import linears_of
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_flux_lora, tiny_output, tiny_pipeline

STEPS, CPU, META = 3, torch.device("cpu"), torch.device("meta")
HOST = {"linear.dtype": "int8", "linear.weights": "host"}


def on_host(pipe, preset="exact", **overrides):
    return accelerate_pipeline(pipe, preset, **{**HOST, **overrides})


def result(pipe, name="flux", steps=STEPS):
    return tiny_output(pipe, name, steps=steps)


def attributes(pipe):
    return {name: set(vars(module)) for name, module in pipe.transformer.named_modules()}


@pytest.fixture(autouse=True)
def moves(monkeypatch):
    """Layers whose weights were moved, with the device. Data of a parameter can't move to a meta device, or from it."""
    seen, original = [], HostWeight._move
    monkeypatch.setattr(quantized_linears, "LEAST_ROWS", 1)  # so that modulations run in 8 bits on the device too,
    monkeypatch.setattr(quantized_linears, "MODULATION", re.compile("(?!)"))  # as other layers do

    def move(self, device):
        seen.append((self.layer, device))
        weight = self.layer.weight
        if (weight.device == META) == (device == META):
            original(self, device)
        else:
            self.layer.weight = nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)

    monkeypatch.setattr(HostWeight, "_move", move)
    return seen


@pytest.fixture
def rounded(monkeypatch):
    """Layers that were rounded."""
    seen, original = [], QuantizedLinears._round

    def round_(self, layer, device):
        seen.append(layer)
        return original(self, layer, device)

    monkeypatch.setattr(QuantizedLinears, "_round", round_)
    return seen


@pytest.mark.parametrize("name", ["flux", "wan22"])
def test_outputs_are_those_of_weights_on_the_device(name):
    """Nothing stays behind, and parameters keep their identity."""
    pipe = tiny_pipeline(name)
    parameters, state, before = [*pipe.transformer.parameters()], attributes(pipe), result(pipe, name)
    accelerate_pipeline(pipe, "exact", **{"linear.dtype": "int8"})
    expected = result(pipe, name)
    on_host(pipe)
    assert torch.equal(result(pipe, name), expected) and torch.equal(result(pipe, name), expected)
    assert any("on the host" in note for note in pipe.dit_accel.report().notes)
    restore_pipeline(pipe)
    assert attributes(pipe) == state
    assert all(a is b for a, b in zip(pipe.transformer.parameters(), parameters, strict=True))
    assert torch.equal(result(pipe, name), before)


@pytest.mark.parametrize("name", ["flux", "wan22", "mochi"])
def test_moving_a_transformer_leaves_the_weights_on_the_host(name):
    """They go to its device when the pipeline is restored; nobody sees the difference in its state."""
    pipe = on_host(tiny_pipeline(name))
    pipe.transformer.to("meta", torch.bfloat16)
    weights = {item: layer.weight.clone() for item, layer in block_linears(pipe.transformer)}
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    pipe.transformer.to("meta")
    kept = {item: pipe.transformer.get_submodule(item).weight for item in weights}
    assert all(torch.equal(kept[item], weight) for item, weight in weights.items())
    waiting = {id(item) for item in kept.values()}
    assert all(item.device == META for item in pipe.transformer.parameters() if id(item) not in waiting)
    assert pipe.transformer.device == next(pipe.transformer.parameters()).device == META
    assert all(torch.equal(pipe.transformer.state_dict()[f"{item}.weight"], weight) for item, weight in weights.items())
    restore_pipeline(pipe)
    assert all(item.device == META for item in pipe.transformer.parameters())


def test_weights_leave_the_device_one_by_one(pipe, moves):
    """Weights that are on the device already go to the host, and return to the same device."""
    pipe.transformer.to("meta")
    on_host(pipe)
    layers = linears_of(pipe).all_layers
    assert [layer for layer, device in moves if device == CPU] == layers
    assert all(layer.weight.device == CPU for layer in layers)
    restore_pipeline(pipe)
    assert [layer for layer, device in moves if device == META] == layers
    assert all(layer.weight.device == META for layer in layers)


@pytest.mark.parametrize("weights", ["host", "device"])
def test_only_changed_weights_are_rounded_again(graph, rounded, weights):
    """Also weights that change through ``.data``, which counts no version; on the device if graphs keep copies."""
    pipe = on_host(tiny_pipeline("flux"), **{"linear.weights": weights, "kernels.graphs": "always"})
    before = result(pipe)
    assert len(rounded) == len(linears_of(pipe).all_layers)
    rounded.clear()
    assert torch.equal(result(pipe), before) and not rounded
    attn, single = pipe.transformer.transformer_blocks[0].attn, pipe.transformer.single_transformer_blocks[0]
    attn.to_v.weight.data.mul_(-1.0)
    bias = single.proj_out.bias.detach().clone()
    with torch.no_grad():
        single.proj_out.bias.add_(1.0)
    changed = result(pipe)
    assert set(rounded) == {attn.to_v, single.proj_out} and not torch.equal(changed, before)
    attn.to_v.weight = nn.Parameter(-attn.to_v.weight.detach())  # which goes to the host
    with torch.no_grad():
        single.proj_out.bias.copy_(bias)
    assert torch.equal(result(pipe), before)
    attn.to_v.weight.data[0, 1] += 1.0  # none of the values that are compared
    assert torch.equal(result(pipe), before)
    pipe.dit_accel.reset()
    captures, changed = graph.captures, result(pipe)
    assert not torch.equal(changed, before) and graph.captures == captures > 0  # copies keep their addresses
    restore_pipeline(pipe)
    assert torch.equal(result(on_host(pipe, **{"linear.weights": weights})), changed)


def test_no_layer_is_kept_twice():
    """Queries, keys and values are rounded before a call joins them."""
    every_tile = {"policy": "sparge", "steps": "all", "top_k": 1.0}
    pipe = accelerate_pipeline(tiny_pipeline("flux"), load_preset("exact", model="flux", skip=every_tile), **HOST)
    result(pipe)
    linears = linears_of(pipe)
    kept = [layer for layers in linears._weights for layer in layers]
    assert len(kept) == len(set(kept)) and any(len(layers) == 3 for layers in linears._weights)


def test_a_layer_that_runs_unchanged_gets_its_weight_back(monkeypatch):
    """Without tokens or under gradients; the report notes it."""
    pipe = on_host(tiny_pipeline("flux"))
    linears, attn = linears_of(pipe), pipe.transformer.transformer_blocks[0].attn
    pipe.transformer.to("meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # which knows no meta device
    x = torch.empty(1, 1, attn.to_q.in_features, device=META)
    with torch.no_grad():
        attn.to_q(x)
        attn.to_k(x[:, 1:])
    attn.to_v(x)
    on_device = {layer for layer in linears.all_layers if layer.weight.device == META}
    assert on_device == {attn.to_k, attn.to_v} and not on_device & set(linears.on_host)
    assert any("have weights on the device" in note for note in pipe.dit_accel.report().notes)
    assert not on_device & set(linears_of(on_host(pipe, "balanced")).on_host), "they stay there under a later preset"
    restore_pipeline(pipe)
    assert all(item.device == META for item in pipe.transformer.parameters())


@pytest.mark.parametrize(("name", "modulation"), [("flux", "norm"), ("qwen-image", "_mod.")])
def test_modulations_run_in_8_bits_where_weights_wait_on_the_host(monkeypatch, name, modulation):
    """They have one token per prompt. They are int8 beside layers in float8."""
    monkeypatch.setattr(quantized_linears, "LEAST_ROWS", LEAST_ROWS)
    monkeypatch.setattr(quantized_linears, "MODULATION", MODULATION)
    pipe = on_host(tiny_pipeline(name), **{"linear.dtype": "float8"})
    result(pipe, name)
    linears = linears_of(pipe)
    modulations = {layer for item, layer in block_linears(pipe.transformer) if modulation in item}
    in_8_bits = {layer for layers in linears._weights for layer in layers if layer in linears.on_host}
    assert modulations and modulations <= in_8_bits
    dtypes = {layer: item.values.dtype for layers, item in linears._weights.items() for layer in layers}
    assert {layer for layer, dtype in dtypes.items() if dtype == torch.int8} == modulations


@pytest.mark.parametrize("later", [[], ["balanced"]], ids=["one-preset", "a-second-preset"])
def test_rounded_weights_leave_the_device_with_the_transformer(later, rounded):
    """They stay from run to run otherwise; graphs that read them go too, and what a later preset took over."""
    pipe = on_host(tiny_pipeline("flux"))
    result(pipe)
    for preset in later:
        on_host(pipe, preset)
    linears = linears_of(pipe)
    kept = [weakref.ref(weights.values) for weights in linears._weights.values()]
    assert kept and all(item() is not None for item in kept)
    pipe.transformer.to("cpu")
    assert all(item() is not None for item in kept)
    pipe.transformer.to("meta")
    assert not any(item() is not None for item in kept)


def test_another_preset_moves_and_rounds_nothing(moves, rounded):
    """A card that can't hold all weights can change presets; the last of them returns the weights."""
    pipe = on_host(tiny_pipeline("flux"))
    before = result(pipe)
    rounded.clear(), moves.clear()
    with accelerated(pipe, "balanced", **HOST):
        result(pipe)
    on_host(pipe)
    assert torch.equal(result(pipe), before) and not rounded
    assert {device for _, device in moves} == {CPU}
    on_host(pipe, **{"linear.dtype": "float8"})
    assert not linears_of(pipe)._weights  # those of before are int8
    accelerate_pipeline(pipe, "exact")
    assert "_apply" not in vars(pipe.transformer.transformer_blocks[0].attn.to_q)
    on_host(pipe, **{"linear.exclude": ["single_*"]})
    assert len(linears_of(pipe).on_host) == len(linears_of(pipe).all_layers)


def test_pipelines_that_share_a_transformer_share_the_weights(moves):
    pipe = on_host(tiny_pipeline("flux"))
    other = type(pipe)(**pipe.components)
    assert torch.equal(result(other), result(pipe))
    on_host(other)
    restore_pipeline(pipe)
    assert not any("_apply" in vars(module) for module in pipe.transformer.modules())
    assert equal_up_to_rounding(result(other), result(tiny_pipeline("flux")))


def fail_at(monkeypatch, layer, to, error):
    """Let the first move of a layer's weight to a device fail."""
    original, errors = HostWeight._move, [error]

    def move(self, device):
        if errors and self.layer is layer and device == to:
            raise errors.pop()
        original(self, device)

    monkeypatch.setattr(HostWeight, "_move", move)


def test_a_failed_acceleration_leaves_nothing(pipe, monkeypatch):
    state, before = attributes(pipe), result(pipe)
    with monkeypatch.context() as patched:
        fail_at(patched, pipe.transformer.transformer_blocks[1].attn.to_k, CPU, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            on_host(pipe)
    assert attributes(pipe) == state and not hasattr(pipe, "dit_accel")
    assert torch.equal(result(pipe), before)


def test_weights_that_do_not_fit_on_the_device_all_stay_on_the_host(pipe, monkeypatch):
    """Everything else is restored; the pipeline can move to the host or be accelerated again."""
    state = attributes(pipe)
    on_host(pipe)
    layers = linears_of(pipe).all_layers
    pipe.transformer.to("meta")
    with monkeypatch.context() as patched:
        fail_at(patched, layers[5], META, torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(torch.OutOfMemoryError) as raised:
            restore_pipeline(pipe)
    assert raised.value.__notes__ == [host_weights.STAY]
    assert attributes(pipe) == state and not hasattr(pipe, "dit_accel")
    assert all(layer.weight.device == CPU for layer in layers)
    on_host(pipe)
    assert all(linears_of(pipe).on_host.device_of(layer) == META for layer in layers)


def test_adapters_that_are_loaded_later_go_to_the_device():
    """peft puts them where the layer's weight is. The layers themselves still run in 8 bits."""

    def output(**weights):
        pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", **{"linear.dtype": "int8"}, **weights)
        result(pipe)
        pipe.load_lora_weights(tiny_flux_lora(pipe), adapter_name="style")
        return pipe, result(pipe)

    pipe, image = output(**{"linear.weights": "host"})
    assert equal_up_to_rounding(image, output()[1]) and not equal_up_to_rounding(image, result(tiny_pipeline("flux")))
    pipe.transformer.to("meta")
    pipe.load_lora_weights(tiny_flux_lora(tiny_pipeline("flux")), adapter_name="second")
    on_host = linears_of(pipe).on_host
    wrappers = [item for item in pipe.transformer.modules() if getattr(item, "base_layer", None) in on_host]

    def devices():
        named = (pair for wrapper in wrappers for pair in wrapper.named_parameters())
        return {item.device for name, item in named if "lora_" in name}

    assert CPU in devices()
    on_host.collect()
    assert devices() == {META} and all(layer.weight.device == CPU for layer in on_host)


def test_offload_of_whole_models_moves_everything_else(pipe):
    """accelerate moves the transformer for each run; weights in 8 bits are made again, as the others are uploaded."""
    accelerate_pipeline(pipe, "exact", **{"linear.dtype": "int8"})
    expected = result(pipe)
    on_host(pipe)
    pipe.transformer, hook = cpu_offload_with_hook(pipe.transformer, execution_device="cpu")
    assert torch.equal(result(pipe), expected)
    hook.offload()
    assert torch.equal(result(pipe), expected)
    restore_pipeline(pipe)
    assert not any("_apply" in vars(module) for module in pipe.transformer.modules())


@pytest.mark.parametrize("kind", ["layers", "groups"])
def test_weights_that_are_offloaded_later_are_left_alone(kind):
    """The layers run unchanged or in 8 bits, and restoring takes nothing from the offload."""
    pipe = on_host(tiny_pipeline("flux"))
    expected = result(pipe)
    if kind == "layers":
        cpu_offload(pipe.transformer, CPU, offload_buffers=True)
    else:
        apply_group_offloading(pipe.transformer, CPU, CPU, "block_level", num_blocks_per_group=1)
    assert (result(pipe) - expected).norm() < 0.05 * expected.norm()
    assert not linears_of(pipe).on_host and not any("_apply" in vars(module) for module in pipe.transformer.modules())
    assert equal_up_to_rounding(result(restore_pipeline(pipe)), result(tiny_pipeline("flux")))


CARDS = {  # bytes free on the GPU and the host per parameter of the layers, and whether their weights wait on the host
    "both-have-room": (2, 8, False),
    "a-short-gpu": (1.1, 8, True),
    "both-short": (1.1, 4, False),
}


@pytest.mark.parametrize("graphs", ["never", "always"])
@pytest.mark.parametrize("gpu, host, waits", CARDS.values(), ids=CARDS)
def test_weights_go_to_the_host_where_memory_is_short(monkeypatch, graph, pipe, gpu, host, waits, graphs):
    """Before a run rounds them, and they stay there under later presets."""
    monkeypatch.setattr(quantized_linears, "MEASURED", ("cpu",))
    auto = {"linear.dtype": "int8", "linear.weights": "auto", "kernels.graphs": graphs}
    expected = result(on_host(pipe, **{"kernels.graphs": graphs}), steps=4)
    layers = linears_of(accelerate_pipeline(restore_pipeline(pipe), "exact", **auto)).layers.values()
    count = sum(layer.weight.numel() for layer in layers)
    on_gpu, on_host_, emptied = *(FreeMemory(int(free * count), int(free * count)) for free in (gpu, host)), []
    monkeypatch.setattr(quantized_linears, "read_host_memory", lambda: on_host_)
    monkeypatch.setattr(quantized_linears, "read_memory", lambda _, empties: emptied.append(empties) or on_gpu)
    assert torch.equal(result(pipe, steps=4), expected) and bool(linears_of(pipe).on_host) == waits
    assert any(emptied) == (gpu < 2)  # PyTorch's cache is only emptied where that may matter
    assert any("on the host" in note for note in pipe.dit_accel.report().notes) == waits
    accelerate_pipeline(pipe, "balanced", **auto)
    assert bool(linears_of(pipe).on_host) == waits


@pytest.mark.parametrize("free, waits", [(1.34, False), (1.33, True)])
def test_weights_that_would_fill_a_gpu_never_go_there(monkeypatch, pipe, free, waits):
    """A quarter of the memory stays free, of the GPU to which they move; a CPU pipeline itself begins no CUDA."""
    int8 = {"linear.dtype": "int8"}
    linears = linears_of(accelerate_pipeline(pipe, "exact", **int8))
    taken = sum(layer.weight.nbytes for layer in linears.all_layers)
    taken += sum(layer.weight.numel() for layer in linears.layers.values())
    monkeypatch.setattr(quantized_linears, "MEASURED", ("meta",))
    monkeypatch.setattr(quantized_linears, "read_memory", lambda *_, empties: FreeMemory(*2 * [int(free * taken)]))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "_lazy_init", lambda: torch.cuda.is_initialized() or pytest.fail("it begins CUDA"))
        result(accelerate_pipeline(pipe, "exact", **int8))
        result(pipe.to(torch.float64).to(torch.float32))
    linears = linears_of(pipe)
    assert not linears.on_host
    pipe.transformer.to("meta")
    assert bool(linears.on_host) == waits
    restore_pipeline(pipe)
    assert not any("_apply" in vars(module) for module in pipe.transformer.modules())


def test_what_moves_weights_of_its_own_is_refused(pipe):
    apply_group_offloading(pipe.transformer, CPU, CPU, "block_level", num_blocks_per_group=1)
    with pytest.raises(UnsupportedError, match="'host' can't be used with group offload of Flux"):
        on_host(pipe)


def test_copies_that_would_fill_the_gpu_under_group_offload_are_not_made(monkeypatch, pipe):
    """They would stay there, because the weights can't wait on the host: the layers run unchanged, after one look."""
    expected, looks = result(pipe), []
    apply_group_offloading(pipe.transformer, CPU, CPU, "leaf_level")
    monkeypatch.setattr(quantized_linears, "MEASURED", ("cpu",))
    monkeypatch.setattr(quantized_linears, "read_memory", lambda *_, empties: looks.append(empties) or FreeMemory(1, 1))
    assert equal_up_to_rounding(result(accelerate_pipeline(pipe, "exact", **{"linear.dtype": "int8"})), expected)
    assert looks == [False, True] and pipe.dit_accel.report().notes == [quantized_linears.CROWDED]


def test_a_transformer_that_is_compiled_later_gets_its_weights_back():
    pipe = on_host(tiny_pipeline("flux"))
    pipe.transformer.compile_repeated_blocks(backend="eager")
    result(pipe)
    assert not linears_of(pipe).on_host


def test_graphs_replay_with_weights_that_have_changed(graph):
    """Rounded weights keep their addresses from run to run."""
    pipe = on_host(tiny_pipeline("flux"), **{"kernels.graphs": "always"})
    before, captures = result(pipe, steps=6), graph.captures
    pipe.transformer.transformer_blocks[0].attn.to_v.weight.data.mul_(-1.0)
    changed, replays = result(pipe, steps=6), graph.replays
    assert graph.captures == captures > 0 and replays > 0 and not torch.equal(changed, before)
    on_host(pipe, **{"kernels.graphs": "never"})
    assert torch.equal(result(pipe, steps=6), changed)


def test_graphs_read_no_weight_on_the_host():
    pipe = on_host(tiny_pipeline("flux"))
    pipe.transformer.to("meta")
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    assert why_not_module("to_q", layer, META) is None
    assert "a weight of to_q is a Parameter on meta" in why_not_module("to_q", layer, CPU)
    restore_pipeline(pipe)
    layer.to_empty(device=CPU)
    assert "a weight of to_q is a Parameter on cpu" in why_not_module("to_q", layer, META)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", ["never", "always"])
@pytest.mark.parametrize("order", ["before", "after", "offload"])
def test_on_a_gpu_outputs_are_those_of_weights_on_it(monkeypatch, order, graphs):
    """The pipeline moves before or after the acceleration, or model by model in each call."""
    monkeypatch.setattr(linear_trial, "TIMED", ())  # weights on the GPU would be tried in bf16 too
    moved = tiny_pipeline("flux").to("cuda")
    plain, int8 = result(moved, steps=6), {"linear.dtype": "int8", "kernels.graphs": graphs}
    expected = result(accelerate_pipeline(moved, "exact", **int8), steps=6)
    pipe = tiny_pipeline("flux").to("cuda" if order == "after" else "cpu")
    on_host(pipe, **{"kernels.graphs": graphs})
    if order == "before":
        pipe.to("cuda")
    if order == "offload":
        pipe.enable_model_cpu_offload()
    for _ in range(2):
        assert torch.equal(result(pipe, steps=6), expected)
    assert bool(pipe.dit_accel.report().replayed) == (graphs == "always" and order != "offload")
    assert all(layer.weight.device == CPU for layer in linears_of(pipe).on_host)
    restore_pipeline(pipe)
    assert {item.device.type for item in pipe.transformer.parameters()} == {"cpu" if order == "offload" else "cuda"}
    assert torch.equal(result(pipe, steps=6), plain)
