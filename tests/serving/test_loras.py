"""LoRAs on the command line: loaded with their weights, errors reported, and SLA's file in their folder used."""

import itertools
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import save_file

from dit_accel import accelerate_pipeline
from dit_accel.cli.options import named_loras, parse_loras, with_projections
from dit_accel.errors import ArgumentError
from dit_accel.serving import loras as serving_loras
from dit_accel.serving.loading import Loading
from dit_accel.serving.loras import load_loras
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker
from dit_accel.tools.demo import demo_path
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_flux_lora, tiny_pipeline

SMALL = ("-p", "a fox", "--steps", "4", "--height", "64", "--width", "64", "--quiet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, pipe = tmp_path_factory.mktemp("loras"), tiny_pipeline("flux")
    pipe.save_pretrained(root / "model")
    (root / "style").mkdir()
    save_file(tiny_flux_lora(pipe), root / "style" / "pytorch_lora_weights.safetensors")
    save_file(tiny_flux_lora(pipe, seed=1), root / "other.safetensors")
    return root


def made(run, folder, tmp_path, *loras):
    options = [word for lora in loras for word in ("--lora", f"{folder}/{lora}")]
    result = run("generate", "-m", folder / "model", *SMALL, "-o", "made.png", "--force", *options)
    assert result.exit_code == 0, result.output
    return np.asarray(Image.open(tmp_path / "made.png"))


def test_loras_are_loaded_with_their_weights(run, folder, tmp_path):
    """Each changes the image, a weight of zero does not, and two add up."""
    plain = made(run, folder, tmp_path)
    style = made(run, folder, tmp_path, "style")
    both = made(run, folder, tmp_path, "style", "other.safetensors:0.5")
    assert equal_up_to_rounding(made(run, folder, tmp_path, "style:0"), plain)
    assert equal_up_to_rounding(made(run, folder, tmp_path, "style:1", "other.safetensors:0"), style)
    assert not any(equal_up_to_rounding(*pair) for pair in itertools.combinations((plain, style, both), 2))


def test_loras_are_part_of_the_weights(folder, pipe):
    """Code inside the blocks runs with them as without: no layer of peft is left."""
    before = {name: weight.clone() for name, weight in pipe.transformer.state_dict().items()}
    load_loras(pipe, parse_loras([str(folder / "style")]))
    after = pipe.transformer.state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("nowhere", "'nowhere' is not a folder, a file or a Hub id"),
        ("./nowhere:0.5", r"'\./nowhere' is not a folder"),
        ("demo-flux/nowhere", "'demo-flux/nowhere' is not a folder"),
        ("owner/name:nan", "a weight must be a finite number, got nan"),
        ("\0", "is not a folder"),
        ("~/nothing", "is not a folder"),  # no repository of that name
        ("owner/name owner/name:0.5", "owner/name was given twice"),
    ],
)
def test_what_is_no_lora_is_told_before_any_work(lora, message):
    with pytest.raises(ArgumentError, match=message):
        parse_loras(lora.split())


def test_the_demo_model_for_wan_ships_with_sla():
    """Its LoRA and projections fit it, and the shipped preset takes the shares that they were trained with."""
    loras = parse_loras(["demo-wan/sla"])
    overrides = with_projections("wan21-sla", {}, loras)
    assert (overrides["skip.critical"], overrides["blocks.size"]) == (0.1, 64)
    pipe = DiffusionPipeline.from_pretrained(demo_path("demo-wan"))
    load_loras(pipe, loras)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerate_pipeline(pipe, "wan21-sla", **overrides)


def test_ids_on_the_hub_are_taken_as_they_are():
    given = ["owner/name", "owner/name/file.safetensors:0.5", "owner/na:me:-2", "owner/other:name"]
    found = {"owner/name": 1.0, "owner/name/file.safetensors": 0.5, "owner/na:me": -2.0, "owner/other:name": 1.0}
    assert parse_loras(given) == found


def test_a_file_that_is_no_lora_is_told(run, folder, tmp_path):
    """A file of other tensors, and a pipeline that takes no LoRA, raise an error."""
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    result = run("generate", "-m", folder / "model", *SMALL, "--lora", "./other.safetensors")
    assert result.exit_code == 2 and "--lora: other.safetensors can't be loaded: " in result.output
    with pytest.raises(ArgumentError, match=r"^lora: object takes no LoRA$"):
        load_loras(object(), {"owner/name": 1.0})


def test_what_slas_fine_tuning_wrote_is_used_where_the_preset_runs_sla(tmp_path):
    """Shares and projections come from the file, explicit settings stay, and other presets use nothing of it."""
    metadata = {"critical": "0.1", "negligible": "0.2", "feature_map": "elu", "block": "128"}
    save_file({"transformer.blocks.0": torch.zeros(2, 2)}, tmp_path / "sla.safetensors", metadata=metadata)
    loras = parse_loras([f"{tmp_path}:0.5"])
    skip = {"projection": str(tmp_path), "critical": 0.1, "negligible": 0.3, "feature_map": "elu"}
    expected = {f"skip.{key}": value for key, value in skip.items()} | {"blocks.size": 128}
    assert with_projections("wan21-sla", {"skip.negligible": 0.3}, loras) == expected
    assert with_projections("wan21-sparge", {}, loras) == with_projections("none", {}, loras) == {}
    own = {"skip.projection": "own.safetensors"}
    assert with_projections("wan21-sla", own, loras) == own


class Pipe:
    """Notes the LoRAs that it is given; its transformer is quantised or not."""

    def __init__(self):
        self.done = []

    def load_lora_weights(self, place, adapter_name, weight_name):
        self.done.append((place, weight_name))

    def set_adapters(self, names, weights):
        self.done.append(tuple(weights))


@pytest.mark.parametrize("is_quantised", [False, True])
def test_each_lora_is_loaded_from_its_place_with_its_weight(monkeypatch, tmp_path, is_quantised):
    """A folder, or a file in a repository of the hub, in folders there too; in quantised weights they stay layers.

    Each of several transformers is fused by itself, and one without a LoRA is left alone.
    """
    (tmp_path / "style").mkdir()
    pipe, fused = Pipe(), []
    first = SimpleNamespace(peft_config={}, hf_quantizer=is_quantised or None)
    second, third = SimpleNamespace(), SimpleNamespace(peft_config={}, hf_quantizer=None)
    for name, each in (("first", first), ("second", second), ("third", third)):
        each.fuse_lora = lambda name=name: fused.append(f"{name} fused")
        each.unload_lora = lambda name=name: fused.append(f"{name} unloaded")
    monkeypatch.setattr("dit_accel.serving.loras.denoisers", lambda pipe: {"a": first, "b": second, "c": third})
    given = [f"{tmp_path}/style:0", "owner/name:-0.5", "owner/other/deep/file.safetensors"]
    load_loras(pipe, parse_loras(given))
    loaded = [(f"{tmp_path}/style", None), ("owner/name", None), ("owner/other", "deep/file.safetensors")]
    assert pipe.done == [*loaded, (0.0, -0.5, 1.0)]
    own = [] if is_quantised else ["first fused", "first unloaded"]
    assert fused == [*own, "third fused", "third unloaded"]


def test_a_lora_is_found_in_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert parse_loras(["~/style:0.5"]) == {f"{folder}/style": 0.5}


def test_loras_of_jobs_leave_the_plain_model(folder, monkeypatch):
    """In any order a job has the bits of its own LoRAs and weights, and without any those of the plain model."""
    sources = named_loras([f"style={folder}/style", f"other={folder}/other.safetensors"])
    worker = Worker(Setup(str(folder / "model"), "balanced", loading=Loading(named_loras=sources)))
    started, draw = worker.pipe.dit_accel, random.Random(0)

    def bits(weights):
        settings = {"prompt": "a fox", "seed": 0, "steps": 2, "height": 32, "width": 32, "loras": weights}
        return worker.make([Job(0, settings)], ".png")[0].data

    weights = [{}, {"style": 1.0}, {"style": 0.3}, {"other": 1}, {"style": 0.5, "other": -1.0}]
    first = [bits(each) for each in weights]
    assert len({*first}) == len(weights)
    for number in range(50):
        monkeypatch.setattr(serving_loras, "MOST_BYTES", draw.choice([0, 2**31]))  # 0: all others leave
        place = draw.randrange(len(weights))
        assert bits(weights[place]) == first[place], number
        assert serving_loras.MOST_BYTES or worker._loras._bytes.keys() == weights[place].keys()
    assert worker.pipe.dit_accel is started
    for wrong in ({"styl": 1.0}, {"style": float("nan")}, {"style": "1"}):
        with pytest.raises(ArgumentError, match=r"loras: must have finite weights of LoRAs \(other, style\), got"):
            bits(wrong)


def test_loras_have_names(folder):
    """LoRAs of a folder have the names of their files."""
    assert named_loras(["a=owner/name", str(folder)]) == {"a": "owner/name", "other": f"{folder}/other.safetensors"}
    for wrong, message in ("a=./nowhere", r"'\./nowhere' is not a folder"), ("owner/name", "must be NAME=LORA"):
        with pytest.raises(ArgumentError, match=message):
            named_loras([wrong])
    with pytest.raises(ArgumentError, match="names that differ"):
        named_loras(["other=owner/name", str(folder)])
