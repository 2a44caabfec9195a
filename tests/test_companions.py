"""Other features that users add to a pipeline, before or after accelerating it: they keep their effect, and so does the
loop.

Compilation is in tests/models/test_compile.py, control nets in tests/models/test_control_net.py, fused projections and
autocast in tests/models/fused.
"""

import functools

import accelerate
import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend

from dit_accel import accelerate_pipeline, restore_pipeline
from tests.levels import CLOSED_LOOP, HEADS, LAYERS
from tests.rounding import distance, equal_up_to_rounding
from tests.tiny import flux, tiny_flux_lora, tiny_inputs, tiny_output, tiny_pipeline
from tests.tiny.inputs import left_half, random_tensor

STEPS, CPU = 6, torch.device("cpu")
HOOKED = "it carries hooks (offload, layerwise casting, …)"
NO_LINEAR, PACKED = "not a plain linear layer", "its weight is quantised"


@pytest.fixture(autouse=True)
def earlier_attention_backend():
    """Restore ``set_attention_backend``, whose setting is global to the process."""
    with attention_backend("native"):
        yield


def hot_swap(pipe):
    """A second LoRA in the tensors of the first."""
    pytest.importorskip("peft")
    pipe.enable_lora_hotswap(target_rank=4)
    pipe.load_lora_weights(tiny_flux_lora(pipe), adapter_name="style")
    pipe.load_lora_weights(tiny_flux_lora(pipe, seed=1), adapter_name="style", hotswap=True)


def ip_adapter(pipe):
    """Projections of an image prompt, with weights that have an effect."""
    flux.add_ip_adapter(pipe)
    generator = torch.Generator().manual_seed(0)
    added = [pipe.transformer.encoder_hid_proj, *pipe.transformer.attn_processors.values()]
    for parameter in (item for part in added if isinstance(part, torch.nn.Module) for item in part.parameters()):
        torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)


def group_offload(pipe, kind):
    pipe.transformer.enable_group_offload(CPU, offload_type=kind, num_blocks_per_group=1)


def torchao_weights(pipe, config):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(pipe.transformer, getattr(torchao, config)())


def quanto_weights(pipe):
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(pipe.transformer, weights=quanto.qint8)
    quanto.freeze(pipe.transformer)


def sdnq_weights(pipe):
    sdnq = pytest.importorskip("sdnq")
    pipe.transformer = sdnq.sdnq_post_load_quant(pipe.transformer, weights_dtype="int8", quant_conv=False)


def modelopt_weights(pipe):
    modelopt = pytest.importorskip("modelopt.torch.quantization")
    modelopt.quantize(pipe.transformer, modelopt.INT8_DEFAULT_CFG, lambda _: tiny_output(pipe, "flux", steps=1))


def replace_linears(pipe, make, multiple=1):
    """Replace all linear layers whose input divides by ``multiple`` with the result of ``make``."""
    for module in list(pipe.transformer.modules()):
        for name, layer in module.named_children():
            if type(layer) is torch.nn.Linear and layer.in_features % multiple == 0:
                setattr(module, name, make(layer))


def gguf_weights(pipe):
    """Weights like those of a .gguf file of type Q8_0, in blocks of 32 features."""
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    def packed(layer):
        kind = gguf.GGMLQuantizationType.Q8_0
        output = GGUFLinear(layer.in_features, layer.out_features, compute_dtype=torch.float32)
        numbers = torch.from_numpy(gguf.quantize(layer.weight.detach().numpy(), kind))
        output.weight = GGUFParameter(numbers, quant_type=kind)
        output.bias = layer.bias
        return output

    replace_linears(pipe, packed, multiple=32)


class PackedLinear(torch.nn.Linear):
    """Linear layer like bitsandbytes' ``Linear4bit``: its weight is uint8 ``[elements / 2, 1]``, two a byte."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.bias, self.scale = layer.bias, layer.weight.detach().abs().max() / 7
        low, high = (layer.weight / self.scale).round().add(8).to(torch.uint8).view(-1, 2).unbind(1)
        self.weight = torch.nn.Parameter((low + 16 * high)[:, None], requires_grad=False)

    def forward(self, x):
        nibbles = torch.cat([self.weight % 16, self.weight // 16], dim=1).view(self.out_features, self.in_features)
        return torch.nn.functional.linear(x, (nibbles.to(x.dtype) - 8) * self.scale, self.bias)


# name: (function that adds it, reason for dense attention at level head, or None)
COMPANIONS = {
    "layerwise-casting": (
        lambda pipe: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        HOOKED,
    ),
    "torchao-int8": (functools.partial(torchao_weights, config="Int8WeightOnlyConfig"), PACKED),
    "torchao-float8": (functools.partial(torchao_weights, config="Float8WeightOnlyConfig"), PACKED),
    "quanto-int8": (quanto_weights, NO_LINEAR),
    "gguf": (gguf_weights, NO_LINEAR),
    "packed-4-bit": (functools.partial(replace_linears, make=PackedLinear), NO_LINEAR),
    "sdnq": (sdnq_weights, None),  # it keeps some layers as they are
    "modelopt": (modelopt_weights, NO_LINEAR),
    "lora-hot-swap": (hot_swap, NO_LINEAR),
    "ip-adapter": (ip_adapter, None),
    "group-offload-blocks": (functools.partial(group_offload, kind="block_level"), None),
    "group-offload-leaves": (functools.partial(group_offload, kind="leaf_level"), HOOKED),
    "model-offload": (lambda pipe: pipe.enable_model_cpu_offload(device=CPU), None),
    "sequential-offload": (lambda pipe: accelerate.cpu_offload(pipe.transformer, CPU, offload_buffers=True), HOOKED),
    "attention-backend": (lambda pipe: pipe.transformer.set_attention_backend("_native_math"), None),
}
every_companion = pytest.mark.parametrize("companion", COMPANIONS)


def call(pipe, companion):
    embeddings = flux.ip_adapter_inputs(torch.Generator().manual_seed(1)) if companion == "ip-adapter" else {}
    embeddings = {key: value for key, value in embeddings.items() if "ip_adapter" in key}
    return tiny_output(pipe, "flux", steps=STEPS, **embeddings)


@functools.cache
def plainly(companion):
    """Result of the pipeline with that feature, without acceleration."""
    pipe = tiny_pipeline("flux")
    COMPANIONS[companion][0](pipe)
    return call(pipe, companion)


@pytest.mark.parametrize("order", ["before", "after"])
@every_companion
def test_it_keeps_its_effect_and_so_does_the_loop(companion, order):
    """Under exact the plain bits; under the closed loop steps are forecast and the result is near; then plain again."""
    plain, pipe, (add, _) = plainly(companion), tiny_pipeline("flux"), COMPANIONS[companion]
    if order == "before":
        add(pipe)
    accelerate_pipeline(pipe, "exact")
    if order == "after":
        tiny_output(pipe, "flux", steps=2)
        add(pipe)
    assert equal_up_to_rounding(call(pipe, companion), plain)
    accelerate_pipeline(pipe, CLOSED_LOOP)
    assert distance(call(pipe, companion), plain) < 0.05
    report = pipe.dit_accel.report()
    assert report.computed_fraction < 0.8 and report.notes == [] and report.fallbacks == []
    assert equal_up_to_rounding(call(restore_pipeline(pipe), companion), plain)


@every_companion
def test_levels_inside_of_blocks_run_or_say_why_not(companion):
    """Blocks that can't be cut, or not be replaced, are computed as they are, to the bit, and the report names why."""
    plain, pipe, (add, of_heads) = plainly(companion), tiny_pipeline("flux"), COMPANIONS[companion]
    add(pipe)
    for preset, reason in ((LAYERS, None), (HEADS, of_heads)):
        accelerate_pipeline(pipe, preset)
        result, report = call(pipe, companion), pipe.dit_accel.report()
        if reason is None:
            assert report.computed_fraction < 1 and distance(result, plain) < 0.05
        else:
            assert equal_up_to_rounding(result, plain)
            assert all(reason in entry["reason"] for entry in report.fallbacks) and report.fallbacks


def test_inpainting_keeps_what_the_mask_keeps():
    """After each step the pipeline restores the image's own latents outside the mask."""
    parts = tiny_pipeline("flux").components
    pipe = diffusers.FluxInpaintPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)

    def run(seed=0):
        generator = torch.Generator().manual_seed(seed)
        picture = random_tensor(torch.Generator().manual_seed(9), flux.HEIGHT, flux.WIDTH)
        mask = left_half(generator, flux.HEIGHT, flux.WIDTH)
        inputs = tiny_inputs("flux", steps=STEPS, image=picture, mask_image=mask, strength=1.0)
        return pipe(**{**inputs, "generator": generator})[0]

    plain = run()
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(run(), plain)
    for preset in (CLOSED_LOOP, LAYERS, HEADS):
        accelerate_pipeline(pipe, preset)
        assert 0 < distance(run(), plain) < 0.05
        assert pipe.dit_accel.report().computed_fraction < 1


@pytest.mark.parametrize("preset", [CLOSED_LOOP, LAYERS], ids=["output", "layer"])
def test_the_attention_backend_that_the_user_has_set_runs_all_that_is_computed(preset, monkeypatch):
    backend = AttentionBackendName._NATIVE_MATH
    function, calls = _AttentionBackendRegistry._backends[backend], []
    counted = lambda *args, **kwargs: (calls.append(backend), function(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setitem(_AttentionBackendRegistry._backends, backend, counted)
    pipe = accelerate_pipeline(tiny_pipeline("flux"), preset)
    pipe.transformer.set_attention_backend(backend.value)
    tiny_output(pipe, "flux", steps=STEPS)
    report = pipe.dit_accel.report()
    assert len(calls) == len(report.layers) * (STEPS - report.steps_by_mode["dispatch"]) < len(report.layers) * STEPS
