"""Loading of pipelines by commands: quantised by torchao on request; unsupported cases raise before any work."""

import io
import json
from contextlib import nullcontext

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel, hooks
from rich.console import Console
from safetensors.torch import save_file

from dit_accel.errors import ArgumentError
from dit_accel.models.hooks import OFFLOAD_HOOK, find_hook
from dit_accel.serving import loading
from dit_accel.serving.loading import Loading, load_pipeline
from dit_accel.serving.pipelines import Setup, open_pipeline
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_flux_lora, tiny_output, tiny_pipeline

SMALL = ("-p", "a fox", "--steps", "6", "--height", "64", "--width", "64", "--quiet")


@pytest.fixture
def folder(saved):
    return saved("flux")


@pytest.fixture
def console():
    return Console(quiet=True)


def is_quantised(layer):
    return "Int8" in type(layer.weight).__name__


def test_int8_is_of_all_linear_layers_in_blocks(folder, console):
    """Layers outside the blocks stay as they were, and the image changes little."""
    pipe = load_pipeline(str(folder), Loading(quantize="int8"), console)
    layers = {name: each for name, each in pipe.transformer.named_modules() if type(each) is torch.nn.Linear}
    assert {name for name, layer in layers.items() if is_quantised(layer)} == {
        name for name, layer in layers.items() if "blocks." in name and not any(n % 16 for n in layer.weight.shape)
    }
    assert any(map(is_quantised, layers.values())) and not is_quantised(layers["proj_out"])
    made, plain = (tiny_output(each, "flux", steps=2) for each in (pipe, tiny_pipeline("flux")))
    assert 0 < (made - plain).norm() / plain.norm() < 0.02


def test_a_quantised_pipeline_is_accelerated_and_compared(run, folder, tmp_path):
    """Plain and accelerated both run on the quantised layers, with a LoRA in them."""
    save_file(tiny_flux_lora(tiny_pipeline("flux")), tmp_path / "style.safetensors")
    options = ("--quantize", "int8", "--lora", "./style.safetensors", "--set", "target_error=0.9")
    result = run("generate", "-m", folder, *SMALL, *options, "--compare", "-o", "a.png", "--json", "a.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "a.json").read_text())["computed_fraction"] < 1


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "message"),
    [
        ("cpu", None, None, "float8 needs .* compute capability 8.9 or later .*, got .* on cpu; use int8"),
        (None, (8, 6), None, "float8 needs .* compute capability 8.9 or later"),
        (None, (8, 9), "float16", "float8 needs bfloat16 .*, got torch.float16"),
        (None, (8, 9), None, None),
    ],
    ids=["cpu", "old", "float16", "RTX 4090"],
)
def test_float8_needs_a_gpu_that_has_its_products(loaded, monkeypatch, device, capability, dtype, message):
    """They give bfloat16 alone."""
    how = Loading(device, dtype, quantize="float8")
    with nullcontext() if message is None else pytest.raises(ArgumentError, match=message):
        assert ("quantize", "float8") in loaded(how, capability=capability)


def test_layers_that_move_one_by_one_cannot_be_quantised():
    with pytest.raises(ArgumentError, match="offload: must be none, text, model or group with --quantize"):
        Loading(offload="sequential", quantize="int8")
    for offload in ("none", "model", "group"):
        assert Loading(offload=offload, quantize="int8").facts == {"quantize": "int8"}


def test_layers_that_are_quantised_already_are_told(folder, console, monkeypatch):
    monkeypatch.setattr(FluxTransformer2DModel, "hf_quantizer", object(), raising=False)
    with pytest.raises(ArgumentError, match="the model's transformer is already quantised"):
        load_pipeline(str(folder), Loading(quantize="int8"), console)


class Pipe:
    components = {"text_encoder": torch.nn.Linear(1, 1), "image_encoder": torch.nn.MultiheadAttention(4, 1)}  # noqa: RUF012

    def __init__(self):
        self.done = []

    def __getattr__(self, name):
        return lambda *given, **named: self.done.append((name, *given, *named.values()))


@pytest.fixture
def loaded(monkeypatch):
    """Load a pipeline that records its calls, on a GPU unless another device is named."""

    def load(how, source="owner/name", quiet=True, capability=(8, 9)):
        pipe = Pipe()

        def from_pretrained(source, **dtype):
            pipe.done.append(("load", source, *dtype.values()))
            return pipe

        monkeypatch.setattr(DiffusionPipeline, "from_pretrained", from_pretrained)
        monkeypatch.setattr(loading, "_resolve_device", lambda device: torch.device(device or "cuda"))
        monkeypatch.setattr(loading, "load_loras", lambda pipe, loras: pipe.done.append(("loras", *loras)))
        monkeypatch.setattr(loading, "quantize", lambda pipe, kind, place: pipe.done.append(("quantize", kind)))
        monkeypatch.setattr(loading, "_offload_groups", lambda pipe, place: pipe.offload_groups(place))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: capability)
        load_pipeline(source, how, Console(quiet=quiet, file=io.StringIO()))
        return pipe.done

    return load


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        (Loading(), torch.bfloat16),
        (Loading(device="cpu"), torch.float32),
        (Loading(dtype="float16"), torch.float16),
        (Loading(device="cpu", dtype="bfloat16"), torch.bfloat16),
    ],
    ids=["gpu", "cpu", "asked on a gpu", "asked on a cpu"],
)
def test_weights_have_the_type_of_the_device_unless_another_is_asked_for(loaded, how, dtype):
    assert loaded(how)[0] == ("load", "owner/name", dtype)


@pytest.mark.parametrize(
    ("offload", "done"),
    [
        ("none", "to"),
        ("text", "enable_group_offload"),
        ("model", "enable_model_cpu_offload"),
        ("group", "offload_groups"),
        ("sequential", "enable_sequential_cpu_offload"),
    ],
)
def test_a_pipeline_goes_where_it_is_asked_to(loaded, offload, done):
    """The pipeline moves to the device, or some of it stays in host memory, which needs a GPU."""
    calls = loaded(Loading(offload=offload))
    assert (done, torch.device("cuda")) in [call[:2] for call in calls]
    whole = str(calls[-2]).endswith("'vae', 'image_encoder'])")  # torch reads the latter's weights by itself
    assert (calls[-2][2:4] == ("leaf_level", True)) == whole == (offload == "text")
    if offload != "none":
        with pytest.raises(ArgumentError, match="offload: needs a CUDA device, got mps"):
            loaded(Loading(device="mps", offload=offload))


def test_loras_come_before_quantising_and_both_before_the_weights_move(loaded):
    """Nothing can be added to quantised weights, and offloading hooks layers as they are then."""
    how = Loading(loras={"owner/lora": 1.0}, quantize="float8", offload="model")
    for quiet in (False, True):
        *names, bar = loaded(how, quiet=quiet)
        assert bar == ("set_progress_bar_config", quiet)
    names = [name for name, *_ in names]
    assert names == ["load", "loras", "quantize", "enable_model_cpu_offload"]


def test_weights_that_wait_on_the_host_never_move(monkeypatch, folder, console):
    """The pipeline is accelerated before it moves; an offloaded one moves by itself, and a plain one is not changed."""
    moved = []
    monkeypatch.setattr(DiffusionPipeline, "to", lambda pipe, place: moved.append(hasattr(pipe, "dit_accel")))
    for weights in ("host", "device"):
        overrides = {"linear.dtype": "int8", "linear.weights": weights}
        pipe, _, preset = open_pipeline(Setup(str(folder), "exact", overrides), console)
        assert (preset.linear.weights, hasattr(pipe, "dit_accel")) == (weights, weights == "host")
    assert hasattr(open_pipeline(Setup(str(folder), "exact-8bit"), console)[0], "dit_accel")  # memory decides
    assert not hasattr(open_pipeline(Setup(str(folder), "none"), console)[0], "dit_accel")
    assert moved == [True, False, True, False]


def test_a_command_keeps_weights_on_the_host(run, folder, tmp_path):
    """The other side of a comparison is plain."""
    options = ("--preset", "exact", "--set", "linear.dtype=int8", "--set", "linear.weights=host", "--compare")
    result = run("generate", "-m", folder, *SMALL, *options, "-o", "a.png", "--json", "a.json")
    assert result.exit_code == 0, result.output
    assert any("on the host" in note for note in json.loads((tmp_path / "a.json").read_text())["report"]["notes"])


def without_streams(monkeypatch):
    """Requests of group offloads for a stream, which they do not get."""
    apply, asked = hooks.apply_group_offloading, []
    streamless = lambda *args, use_stream, **named: asked.append(use_stream) or apply(*args, **named)  # noqa: E731
    monkeypatch.setattr(hooks, "apply_group_offloading", streamless)
    return asked


def test_group_offload_moves_blocks_of_the_transformer_and_layers_of_other_models(monkeypatch):
    """Results are the plain ones. A CPU has no streams; all but the autoencoder ask for one."""
    pipe, plain = tiny_pipeline("flux"), tiny_output(tiny_pipeline("flux"), "flux", steps=6)
    asked = without_streams(monkeypatch)
    loading._offload_groups(pipe, torch.device("cpu"))
    assert sorted(asked) == [False, True, True, True]
    assert find_hook(pipe.transformer.transformer_blocks[0], OFFLOAD_HOOK) is not None
    assert find_hook(pipe.transformer.transformer_blocks[0].attn.to_q, OFFLOAD_HOOK) is None
    assert find_hook(pipe.vae.decoder.conv_in, OFFLOAD_HOOK) is not None
    assert equal_up_to_rounding(tiny_output(pipe, "flux", steps=6), plain)


def test_group_offload_leaves_models_whole_that_have_no_groups(monkeypatch):
    """diffusers says which, but not SigLIP; a transformer among them is an error that names what fits."""
    pipe = tiny_pipeline("framepack")
    monkeypatch.setattr(pipe.vae, "_supports_group_offloading", False, raising=False)
    monkeypatch.setattr(pipe.transformer, "enable_group_offload", lambda *_, **__: None, raising=False)
    without_streams(monkeypatch)
    loading._offload_groups(pipe, torch.device("cpu"))
    parts = [pipe.vae, pipe.image_encoder, pipe.text_encoder, pipe.text_encoder_2]
    assert [any(find_hook(each, OFFLOAD_HOOK) for each in part.modules()) for part in parts] == [False] * 2 + [True] * 2
    monkeypatch.setattr(pipe.transformer, "_supports_group_offloading", False, raising=False)
    with pytest.raises(ArgumentError, match=r"offload: group can't move .* transformer, HunyuanVideoFramepack.*; use"):
        loading._offload_groups(pipe, torch.device("cpu"))


def test_a_model_is_found_in_the_home_folder(loaded, folder, monkeypatch):
    """Shells expand `~` at the beginning of a word alone."""
    monkeypatch.setenv("HOME", str(folder.parent))
    assert loaded(Loading(), f"~/{folder.name}")[0][1] == str(folder)


def test_layers_get_the_kind_that_is_asked_for(monkeypatch):
    import torchao.quantization

    configs = []
    monkeypatch.setattr(torchao.quantization, "quantize_", lambda module, config, *_, **__: configs.append(config))
    for kind in ("int8", "float8"):
        loading.quantize(tiny_pipeline("flux"), kind, torch.device("cpu"))
    names = [type(each).__name__ for each in configs]
    assert names == ["Int8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"]
