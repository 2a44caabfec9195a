"""Linear layers of blocks in 8 bits: the choice of layers, complete removal, and unsupported cases."""

from contextlib import contextmanager
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.kernels import quantize_rows
from dit_accel.loop.report import RunReport
from dit_accel.models.beside import linear_trial, quantized_linears
from dit_accel.models.beside.linear_trial import LinearTrial
from dit_accel.models.beside.quantized_linears import LEAST_ROWS, block_linears, project_together, roundable
from dit_accel.models.driver import FamilyDriver
from dit_accel.models.graphs.limits import why_not_module
from dit_accel.models.hooks import Hook
from dit_accel.models.stored_weights import is_readable
from scripts.bench.card_memory.weights import WEIGHTS
from scripts.bench.model_speed.models import TINY
from tests.models.test_transformer import recorded_calls
from tests.rounding import distance
from tests.test_changes_under_way import add_adapters, unmerged
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 4
INT8 = {"linear.dtype": "int8"}


def hooked(pipe):
    registries = ((module, getattr(module, "_diffusers_hook", None)) for module in pipe.transformer.modules())
    return [module for module, item in registries if item and any(isinstance(h, Hook) for h in item.hooks.values())]


def linears_of(pipe):
    return pipe.transformer._diffusers_hook.hooks["dit_accel"].session.driver.linears


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [*((name, "int8", 0.05) for name in ("flux", "hunyuan", "sd3", "wan22")), ("ltx", "float8", 0.2)],
)
def test_outputs_stay_near_and_nothing_stays_behind(name, dtype, most):
    """Families with blocks of our own, with facts, and without. Rounded copies go with the run."""
    pipe = tiny_pipeline(name)
    plain = tiny_output(pipe, name, steps=STEPS)
    accelerate_pipeline(pipe, "exact", **{"linear.dtype": dtype})
    assert 0 < distance(tiny_output(pipe, name, steps=STEPS), plain) < most
    assert any(f"linear layers in {dtype}" in note for note in pipe.dit_accel.report().notes)
    assert linears_of(pipe).layers and not linears_of(pipe)._weights and not linears_of(pipe)._rows
    restore_pipeline(pipe)
    assert torch.equal(tiny_output(pipe, name, steps=STEPS), plain)
    assert not hooked(pipe)


def test_a_layer_that_loses_its_bias_under_way_is_rounded_again(monkeypatch):
    """It leaves the product with others, which still have one."""
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    monkeypatch.setattr(quantized_linears, "LEAST_ROWS", 1)
    pipe, seen = accelerate_pipeline(tiny_pipeline("flux"), "exact", **INT8), []
    attn = pipe.transformer.transformer_blocks[0].attn
    layers = attn.to_q, attn.to_k, attn.to_v

    def drop(pipe, step, timestep, tensors):
        kept = linears_of(pipe)._weights
        seen.append([(names in kept and kept[names].bias is not None) for names in (layers, layers[1:2])])
        attn.to_k.bias = None
        return {}

    tiny_output(pipe, "flux", steps=STEPS, callback_on_step_end=drop)
    assert seen == [[True, False]] + [[False, False]] * (STEPS - 1) and layers[1:2] in linears_of(pipe)._together


CHANGES = {
    "values": lambda layer: layer.weight.data.mul_(-1.0),
    "weight": lambda layer: setattr(layer, "weight", torch.nn.Parameter(-layer.weight)),
    "bias": lambda layer: layer.bias.data.add_(1.0),
    "bias in float64": lambda layer: setattr(layer, "bias", torch.nn.Parameter(layer.bias.double() + 1.0)),
    "no bias": lambda layer: setattr(layer, "bias", None),
}


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_changed_layer_is_rounded_again_wherever_it_is_called(change, weights):
    """Alone, outside of the transformer's calls; and with the layers whose product it shared, in the next call."""
    linears = linears_of(accelerate_pipeline(tiny_pipeline("flux"), "exact", **INT8, **{"linear.weights": weights}))
    layers, report = [*linears.layers.values()][:3], RunReport("exact", "flux", [])
    x = torch.randn(1, LEAST_ROWS, layers[0].in_features)
    with linears.call(report, "kind", "first"):
        project_together(layers, x)
    change(layers[1])
    alone = [layer(x) for layer in layers]
    with linears.call(report, "kind", "second"):
        together = project_together(layers, x)
    for layer, output, other in zip(layers, alone, together, strict=True):
        bias = None if layer.bias is None else layer.bias.float()
        assert distance(output, torch.nn.functional.linear(x, layer.weight, bias)) < 0.02 and torch.equal(output, other)


@torch.no_grad()
def test_calls_without_the_loop_round_weights_once(monkeypatch):
    pipe, rounded = tiny_pipeline("flux"), []
    call = recorded_calls(pipe, "flux")[0]
    (plain,) = pipe.transformer(**call)
    linears = linears_of(accelerate_pipeline(pipe, "exact", **INT8))
    round_ = linears._round
    pipe.transformer._diffusers_hook.hooks["dit_accel"].session.driver.timesteps = ()  # calls have none
    monkeypatch.setattr(linears, "_round", lambda *call: rounded.append(call) or round_(*call))
    outputs = [pipe.transformer(**call)[0] for _ in range(2)]
    assert len(rounded) == len(linears._together) > 0 and torch.equal(*outputs)
    assert 0 < distance(outputs[0], plain) < 0.05


@pytest.mark.parametrize(("preset", "weights"), [("exact", "device"), ("turbo", "host")])
@pytest.mark.parametrize("scales", [{2: 0.7}, {1: 0.2, 4: 4.0}, {1: 1.0, 4: 0.0}], ids=["merged", "again", "unmerged"])
def test_a_lora_that_is_merged_under_way_takes_effect(pipe, preset, weights, scales):
    """The error is that of a run without it, also where a callback takes it out and merges it at another scale."""
    add_adapters(pipe)

    def output(scales):
        def callback(pipe, step, timestep, tensors):
            if step in scales:
                pipe.transformer.unfuse_lora()
                pipe.transformer.set_adapters("one", float(scales[step] > 0))
                if scales[step]:
                    pipe.transformer.fuse_lora(lora_scale=scales[step], adapter_names=["one"])
            return tensors

        unmerged(pipe)
        return tiny_output(pipe, "flux", steps=8, callback_on_step_end=callback)

    plain, changed = output({}), output(scales)
    accelerate_pipeline(pipe, preset, **INT8, **{"linear.weights": weights})
    assert distance(output(scales), changed) < 1.5 * distance(output({}), plain)


def test_calls_on_several_streams_take_turns(monkeypatch):
    """Weights and inputs are rounded in the call's turn, and freed once the GPU has ended the last one."""
    pipe, log = accelerate_pipeline(tiny_pipeline("flux"), "exact", **INT8), []
    tiny_output(pipe, "flux", steps=STEPS)
    linears = linears_of(pipe)

    @contextmanager
    def turn(device):
        log.append("begin")
        yield
        log.append("leave")

    linears._turns = SimpleNamespace(turn=turn, end=lambda: log.append("end" * bool(linears._weights)))
    logged = lambda *args, **named: log.append("round") or quantize_rows(*args, **named)  # noqa: E731
    monkeypatch.setattr(quantized_linears, "quantize_rows", logged)
    tiny_output(pipe, "flux", steps=STEPS)
    assert [item for item, _ in groupby(log)] == [*["begin", "round", "leave"] * STEPS, "end"]


@pytest.mark.parametrize("milliseconds", [(300, 170), (175, 170)], ids=["slower", "equal"])
def test_layers_stay_unchanged_where_8_bits_are_slower(monkeypatch, milliseconds):
    """Three calls in 8 bits are timed, then unchanged ones; later calls of this kind take the faster way."""
    monkeypatch.setattr(linear_trial, "TIMED", ("cpu",))
    pipe, resting = tiny_pipeline("flux"), []
    plain = tiny_output(pipe, "flux", steps=STEPS)
    linears = linears_of(accelerate_pipeline(pipe, "exact", **INT8))

    def stopwatch(device):
        resting.append(linears.is_resting)
        seconds = milliseconds[linears.is_resting] / 1000
        return lambda: lambda: seconds

    linears._trial = LinearTrial(stopwatch)
    first = tiny_output(pipe, "flux", steps=STEPS)
    second = tiny_output(pipe, "flux", steps=STEPS)
    is_slower = milliseconds[0] > 200
    assert resting == [False, False, False, True] + [True] * (not is_slower)
    assert distance(first, plain) > 0 and torch.equal(second, plain) == is_slower
    remark = "linear layers unchanged in float32, in which a call takes 170 ms instead of 300 ms in int8"
    assert (remark in pipe.dit_accel.report().notes) == is_slower
    tiny_output(pipe, "flux", steps=1, width=64, height=32)
    assert resting[-1] is False  # another size is timed by itself
    restore_pipeline(pipe)
    assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), plain)


def test_replayed_calls_stay_in_8_bits():
    """A graph hides the launches, so nothing is timed once a call was replayed."""
    report, trial = RunReport("exact", "flux", []), LinearTrial(lambda device: lambda: lambda: 1.0)

    def replay():
        report.replayed += 1

    for compute in (lambda: None, replay, lambda: None):
        trial.run("kind", torch.device("cuda"), report, compute)
        assert not trial.is_timing("kind")
    assert trial.slower["kind"] is None


def test_blocks_of_our_own_round_in_the_op_before_a_product(monkeypatch):
    """Norms round their results. What is left is attention's output, once for both streams, and each MLP's inside."""
    counted, kernel = [], quantized_linears.quantize_rows

    def count(x, *more, **options):
        counted.append(x.ndim == 3)  # rows of tokens, not weights
        return kernel(x, *more, **options)

    monkeypatch.setattr(quantized_linears, "quantize_rows", count)
    monkeypatch.setattr(quantized_linears, "LEAST_ROWS", 1)
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", **INT8)
    tiny_output(pipe, "flux", steps=1)
    assert sum(counted) == 3 * pipe.transformer.config.num_layers + pipe.transformer.config.num_single_layers


def test_queries_keys_and_values_multiply_together():
    """Blocks of our own ask for them at once; a layer with a hook of the user's is called."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", **INT8)
    attn = pipe.transformer.single_transformer_blocks[0].attn
    layers, x = (attn.to_q, attn.to_k, attn.to_v), torch.randn(1, 80, attn.to_q.in_features)
    linears, calls = linears_of(pipe), []
    with torch.no_grad():
        with linears.call(RunReport("exact", "flux", []), "kind", "version"):
            together, apart = project_together(layers, x), [layer(x) for layer in layers]
        assert all(map(torch.equal, together, apart)) and layers in linears._weights
        attn.to_k.register_forward_hook(lambda *_: calls.append(1))
        assert all(map(torch.equal, project_together(layers, x), apart))
    assert calls == [1]


@torch.no_grad()
def test_a_layer_alone_takes_its_rows_of_a_product_with_wider_layers():
    """Its rounded weights begin where those of the layers before it end, however wide these are."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", **INT8)
    block, linears = pipe.transformer.single_transformer_blocks[0], linears_of(pipe)
    layers = block.proj_mlp, block.attn.to_q, block.attn.to_k
    assert layers[0].out_features > layers[1].out_features
    with linears.call(RunReport("exact", "flux", []), "kind", "version"):
        linears.project(*layers, x=torch.randn(1, 80, layers[0].in_features))
    (together,) = linears._weights.values()
    for layer in layers:
        alone, part = linears._round(layer, layer.weight.device), linears._part(layer)
        assert all(map(torch.equal, part, alone))
        assert part.values.untyped_storage().data_ptr() == together.values.untyped_storage().data_ptr()


def test_what_cannot_be_is_refused_and_leaves_the_pipeline_alone(pipe):
    with pytest.raises(UnsupportedError, match=r"every plain linear layer .* is excluded or offloaded"):
        accelerate_pipeline(pipe, "exact", **INT8, **{"linear.exclude": ["*"]})
    with pytest.raises(UnsupportedError, match=r"exclude '\*\.to_outt' matches no layer; layers are .*to_out"):
        accelerate_pipeline(pipe, "exact", **INT8, **{"linear.exclude": ["*.to_outt"]})
    pipe.transformer.compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"is compiled, and linear\.dtype 'int8' replaces layers inside"):
        accelerate_pipeline(pipe, "exact", **INT8)
    assert not hooked(pipe)


def test_auto_takes_int8_where_the_gpu_multiplies_it_fast(monkeypatch):
    """Its error is a third of float8's."""
    for capability, dtype in {(8, 6): "int8", (9, 0): "int8", (10, 3): "float8"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, item=capability: item)
        assert quantized_linears.dtype_for(load_preset("exact-8bit").linear, torch.device("cuda")) == dtype


@pytest.mark.parametrize("form", ["int8", "float8"])
def test_weights_of_torchao_run_as_the_weights_that_they_stand_for(monkeypatch, form):
    """To the bit, if copies fit on the GPU, and torchao's own run again afterwards. A graph may read them."""
    monkeypatch.setattr(quantized_linears, "LEAST_ROWS", 1)  # others would run by torchao's products
    pipe, other = tiny_pipeline("flux"), tiny_pipeline("flux")
    for item in (pipe, other):
        WEIGHTS[form][1](item.transformer)
    for layer in roundable(other.transformer, load_preset("exact", **INT8).linear).values():
        layer.weight = torch.nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    plain = tiny_output(pipe, "flux", steps=STEPS)
    expected, *runs = (accelerate_pipeline(item, "exact", **INT8) for item in (other, pipe, pipe))
    expected = tiny_output(expected, "flux", steps=STEPS)
    assert all(torch.equal(tiny_output(item, "flux", steps=STEPS), expected) for item in runs)
    assert why_not_module("to_q", pipe.transformer.transformer_blocks[0].attn.to_q, torch.device("cpu")) is None
    assert not is_readable(SimpleNamespace(shape=2, qdata=SimpleNamespace(shape=2), act_pre_scale=0.5))  # SmoothQuant
    linears_of(pipe)._is_full = lambda *_: True
    assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), plain)
    assert pipe.dit_accel.report().notes == [quantized_linears.CROWDED]


def test_an_input_that_changes_in_place_is_rounded_anew():
    """For example residual streams; also under no_grad, where versions are still counted."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", **INT8)
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    linears, x = linears_of(pipe), torch.randn(1, 80, layer.in_features)
    with torch.no_grad(), linears.call(RunReport("exact", "flux", []), "kind", "version"):
        linears.project(layer, x=x)
        x.add_(1.0)
        changed = linears.project(layer, x=x)
        assert torch.equal(changed, linears.project(layer, x=x.clone()))


def test_calls_that_run_as_they_are():
    """Under autocast, of few rows, with other dtypes, of modulations, and where gradients are wanted."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", **INT8)
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    linears, x = linears_of(pipe), torch.randn(1, LEAST_ROWS, layer.in_features)
    with torch.no_grad():
        assert linears.takes(layer, x)
        assert not linears.takes(layer, x[:, 1:])
        assert not linears.takes(layer, x.bfloat16())
        assert not linears.takes(pipe.transformer.transformer_blocks[0].norm1.linear, x), "a modulation"
        with torch.autocast("cpu", torch.bfloat16):
            assert not linears.takes(layer, x)
    assert not linears.takes(layer, x)


@pytest.mark.parametrize(("model", "modulation"), [("flux", "norm"), ("minimax-h3", "adaln")])
def test_layers_that_are_never_rounded(model, modulation):
    """Modulations, layers whose names match a pattern, and layers that accelerate offloads."""
    transformer, section = TINY[model].build(), load_preset("exact", **INT8).linear
    layers = roundable(transformer, section)
    assert layers and not any(modulation in name for name in layers)
    assert any(modulation in name for name, _ in block_linears(transformer))
    some = roundable(transformer, load_preset("exact", **INT8, **{"linear.exclude": ["*.to_?", "*.to_out.0"]}).linear)
    assert some and not any(name.endswith(("to_q", "to_k", "to_v", "to_out.0")) for name in some)
    name = next(iter(layers))
    layers[name]._hf_hook = object()
    assert roundable(transformer, section).keys() == layers.keys() - {name}
