"""How commands load a pipeline: quantised by torchao where asked, and what can't be is told before any work."""

import json

import pytest
import torch

from dit_accel.cli.loading import Loading, load_pipeline
from dit_accel.cli.options import OptionError
from dit_accel.tools.testing import tiny_flux_lora, tiny_output, tiny_pipeline

SMALL = ("-p", "a fox", "--steps", "6", "--height", "64", "--width", "64", "--quiet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved tiny pipeline."""
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline("flux").save_pretrained(folder)
    return folder


@pytest.fixture
def console():
    from rich.console import Console

    return Console(quiet=True)


def is_quantised(layer):
    return "Int8" in type(layer.weight).__name__


def test_int8_is_of_all_linear_layers_in_blocks(folder, console):
    """What lies around the blocks stays as it was, and the picture is nearly that of before."""
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
    from safetensors.torch import save_file

    save_file(tiny_flux_lora(tiny_pipeline("flux")), tmp_path / "style.safetensors")
    options = ("--quantize", "int8", "--lora", "./style.safetensors", "--set", "target_error=0.9")
    result = run("generate", "-m", folder, *SMALL, *options, "--compare", "-o", "a.png", "--json", "a.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "a.json").read_text())["computed_fraction"] < 1


def test_the_manifest_says_that_layers_were_quantised(run, folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("a fox\n")
    command = ("generate", "-m", folder, *SMALL[2:], "--prompts", "prompts.txt", "--output-dir", "out")
    assert run(*command, "--quantize", "int8").exit_code == 0
    assert json.loads((tmp_path / "out" / "manifest.jsonl").read_text())["quantize"] == "int8"


def test_what_cannot_be_quantised_is_told(folder, console):
    """float8 without a GPU that has its products, and layers that are moved one by one."""
    with pytest.raises(OptionError, match=r"float8 needs a GPU from compute capability 8.9 on .*, got cpu; take int8"):
        load_pipeline(str(folder), Loading(device="cpu", quantize="float8"), console)
    with pytest.raises(OptionError, match="--offload: must be model or none with --quantize"):
        Loading(offload="sequential", quantize="int8")
    for offload in ("model", "none"):
        assert Loading(offload=offload, quantize="int8").facts == {"quantize": "int8"}


def test_float8_is_of_bfloat16(folder, console, monkeypatch):
    """Its products give no other type."""
    monkeypatch.setattr("dit_accel.cli.loading._resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (9, 0))
    with pytest.raises(OptionError, match=r"float8 needs --dtype bfloat16, got torch.float16"):
        load_pipeline(str(folder), Loading(dtype="float16", quantize="float8"), console)


def test_layers_that_are_quantised_already_are_told(folder, console, monkeypatch):
    from diffusers import FluxTransformer2DModel

    monkeypatch.setattr(FluxTransformer2DModel, "hf_quantizer", object(), raising=False)
    with pytest.raises(OptionError, match="the model's transformer is quantised already"):
        load_pipeline(str(folder), Loading(quantize="int8"), console)
