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
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.models.beside.quantized_linears import block_linears
from scripts.bench.card_memory.weights import WEIGHTS
from tests.levels import CLOSED_LOOP, HEADS, LAYERS
from tests.rounding import distance, equal_up_to_rounding
from tests.tiny import flux, tiny_flux_lora, tiny_inputs, tiny_output, tiny_pipeline
from tests.tiny.inputs import left_half, random_tensor

pytestmark = pytest.mark.usefixtures("own_attention_backend")

STEPS, CPU = 6, torch.device("cpu")
HOOKED = "it carries hooks (offload, layerwise casting, …)"
NO_LINEAR, PACKED = "not a plain linear layer", "its weight is quantised"


def hot_swap(pipe):
    """A second LoRA in the tensors of the first."""
    pytest.importorskip("peft")
    pipe.enable_lora_hotswap(target_rank=4)
    pipe.load_lora_weights(tiny_flux_lora(pipe), adapter_name="style")
    pipe.load_lora_weights(tiny_flux_lora(pipe, seed=1), adapter_name="style", hotswap=True)


def two_loras(pipe):
    """A distillation's LoRA and a style's, with weights of their own."""
    pytest.importorskip("peft")
    for seed, name in enumerate(("turbo", "style")):
        pipe.load_lora_weights(tiny_flux_lora(pipe, seed=seed), adapter_name=name)
    pipe.set_adapters(["turbo", "style"], [1.0, 0.6])


def ip_adapter(pipe):
    """Projections of an image prompt, with weights that have an effect."""
    flux.add_ip_adapter(pipe)
    generator = torch.Generator().manual_seed(0)
    added = [pipe.transformer.encoder_hid_proj, *pipe.transformer.attn_processors.values()]
    for parameter in (item for part in added if isinstance(part, torch.nn.Module) for item in part.parameters()):
        torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)


def group_offload(pipe, kind):
    pipe.transformer.enable_group_offload(CPU, offload_type=kind, num_blocks_per_group=1)


def stored(form):
    """Return a function that stores weights of blocks in another form."""
    package, change = WEIGHTS[form]

    def store(pipe):
        pytest.importorskip(package or "torch")
        change(pipe.transformer)

    return store


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


class PackedLayer(torch.nn.Module):
    """Layer like SVDQuant's, whose kernels need a GPU: no linear layer, and no ``weight``."""

    def __init__(self, layer):
        super().__init__()
        self.bias, self.scale = layer.bias, layer.weight.detach().abs().max() / 7
        self.qweight = torch.nn.Parameter((layer.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.qweight * self.scale, self.bias)


# name: (function that adds it, reason for dense attention at level head, or None)
COMPANIONS = {
    "layerwise-casting": (stored("cast"), HOOKED),
    "torchao-int8": (stored("int8"), PACKED),
    "torchao-float8": (stored("float8"), PACKED),
    "torchao-nvfp4": (stored("torchao-nvfp4"), PACKED),
    "quanto-int8": (quanto_weights, NO_LINEAR),
    "gguf": (stored("q4"), NO_LINEAR),
    "bitsandbytes-nf4": (stored("nf4"), NO_LINEAR),
    "nvfp4": (stored("nvfp4"), NO_LINEAR),
    "svdquant": (
        lambda pipe: [pipe.transformer.set_submodule(n, PackedLayer(x)) for n, x in [*block_linears(pipe.transformer)]],
        NO_LINEAR,
    ),
    "sdnq": (sdnq_weights, None),  # it keeps some layers as they are
    "modelopt": (modelopt_weights, NO_LINEAR),
    "lora-hot-swap": (hot_swap, NO_LINEAR),
    "two-loras": (two_loras, NO_LINEAR),
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
    pipe = diffusers.FluxInpaintPipeline(**tiny_pipeline("flux").components)
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
        assert 0 < distance(run(), plain) < 0.05 and pipe.dit_accel.report().computed_fraction < 1


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
