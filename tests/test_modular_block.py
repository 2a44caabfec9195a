"""The block for modular pipelines: the same as ``accelerate_pipeline``, and removed without a trace."""

import json

import diffusers
import PIL.Image
import pytest
import torch
from diffusers.utils import dynamic_modules_utils

from dit_accel import AccelerateBlock, accelerate_pipeline, restore_pipeline
from dit_accel.errors import PresetError, UnsupportedError
from tests.models import tiny
from tests.models.test_every_pipeline import attributes
from tests.rounding import equal_up_to_rounding
from tests.tiny import TINY_PIPELINES, tiny_pipeline

STEPS = 8
ENDS = ("text_encoder", "vae_encoder", "decode")  # blocks that a tiny pipeline without an encoder does without
BLOCKS = {
    "flux": diffusers.FluxAutoBlocks,
    "sd3": diffusers.StableDiffusion3AutoBlocks,
    "wan22": diffusers.Wan22Blocks,  # two transformers
    "z-image": diffusers.ZImageAutoBlocks,
}


@pytest.fixture
def modular():
    """Makes a tiny modular pipeline with a block at a place; pipelines of one name share their components."""
    result = []

    def make(name, block=None, place=0, workflow=None):
        blocks = BLOCKS[name]()
        if name not in TINY_PIPELINES:
            for item in ENDS:
                del blocks.sub_blocks[item]
        if block is not None:
            blocks.sub_blocks.insert("accelerate", block, place)
        pipe = (blocks.get_workflow(workflow) if workflow else blocks).init_pipeline()
        parts = tiny.pipeline(name).components
        pipe.update_components(**{part: parts[part] for part in parts if part in pipe._component_specs})
        result.append(pipe)
        return pipe

    yield make
    for pipe in result:
        restore_pipeline(pipe)


def call(pipe, name="flux", output="latents", **arguments):
    size = {"height": 64, "width": 48, "num_inference_steps": STEPS}
    if name in TINY_PIPELINES:
        size |= {"prompt": "a red fox", "max_sequence_length": 37}
    else:
        size |= tiny.built(name)[1]
    if name == "wan22":
        size["num_frames"] = 5
    return pipe(**size, generator=torch.Generator().manual_seed(0), output=output, **arguments)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_decides_as_accelerate_pipeline_does(modular, name):
    """Same bits and same report; a call with preset "none" gives the plain bits, and nothing is left."""
    whole, pipe = modular(name), modular(name, AccelerateBlock("turbo", target_error=5.0))
    plain, left = call(whole, name), attributes(pipe)
    accelerate_pipeline(whole, "turbo", target_error=5.0)
    expected, known = call(whole, name), whole.dit_accel.report()
    restore_pipeline(whole)
    assert torch.equal(call(pipe, name), expected) and not torch.equal(expected, plain)
    found = pipe.dit_accel.report()
    assert (found.steps_by_mode, found.preset, found.notes) == (known.steps_by_mode, known.preset, known.notes)
    assert found.parts.keys() == known.parts.keys()
    assert torch.equal(call(pipe, name, preset="none"), plain) and attributes(pipe) == left


@pytest.mark.parametrize(("name", "place"), [("flux", 2), ("wan22", 1)], ids=["flux", "wan22"])
def test_the_block_may_stand_right_before_the_denoising(modular, name, place):
    pipe, first = modular(name, AccelerateBlock("turbo"), place), modular(name, AccelerateBlock("turbo"))
    assert torch.equal(call(pipe, name), call(first, name))
    assert first.dit_accel is pipe.dit_accel  # they share the transformer


def test_a_call_changes_the_preset(modular):
    """A preset replaces the block's preset and keys, a target its target, for one call; else the acceleration stays."""
    pipe = modular("flux", AccelerateBlock("balanced", target_error=0.1))

    def ran(**arguments):
        acceleration = call(pipe, output="dit_accel", **arguments)
        assert acceleration is pipe.dit_accel and len(acceleration.report().steps) == STEPS
        schedule = acceleration.preset.schedule
        return acceleration, (acceleration.preset.name, schedule.target_error, schedule.target_psnr)

    first, settings = ran()
    assert settings == ("balanced", 0.1, None)
    assert ran()[0] is first and ran(target_error=0.1)[0] is first
    second, settings = ran(preset="turbo")
    assert settings == ("turbo", 0.3, None) and second is not first
    assert ran(preset=second.preset)[0] is second
    assert ran(target_error=0.2)[1] == ("balanced", 0.2, None) and ran(target_psnr=30)[1][2] == 30.0
    assert ran()[1] == ("balanced", 0.1, None)


def test_a_new_transformer_is_accelerated(modular):
    pipe = modular("flux", AccelerateBlock("turbo"))
    expected = call(pipe)
    pipe.update_components(transformer=tiny_pipeline("flux").transformer)
    assert equal_up_to_rounding(call(pipe), expected)
    assert len(pipe.dit_accel.report().steps) == STEPS and not pipe.dit_accel.report().notes


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_workflows(modular, name):
    pipe = modular(name, AccelerateBlock("turbo"))
    pictures = {"image": PIL.Image.new("RGB", (48, 64), "red"), "strength": 0.9}
    for workflow, arguments in (("text2image", {}), ("image2image", pictures)):
        found = call(pipe, name, **arguments)
        assert pipe.dit_accel.report().steps_by_mode["dispatch"] > 0
        assert torch.equal(call(modular(name, AccelerateBlock("turbo"), workflow=workflow), name, **arguments), found)


def test_a_call_continues_from_the_state_of_another(modular):
    """The state has the acceleration, and so has its copy; a plain call has none."""
    pipe = modular("sd3", AccelerateBlock("turbo"))
    state = call(pipe, "sd3", output=None)
    again = call(pipe, "sd3", output=None, state=state)
    assert again is not state and again.dit_accel is state.dit_accel is pipe.dit_accel
    assert call(pipe, "sd3", output=["dit_accel"], preset="none") == {"dit_accel": None}


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (diffusers.FluxAutoBlocks, r"pipe\.transformer of this FluxModularPipeline is not loaded"),
        (diffusers.StableDiffusionXLAutoBlocks, "StableDiffusionXLModularPipeline; pipelines that denoise with a UNet"),
    ],
    ids=["not loaded", "UNet"],
)
def test_pipelines_without_a_transformer_are_refused(blocks, reason):
    blocks = blocks()
    blocks.sub_blocks.insert("accelerate", AccelerateBlock(), 0)
    with pytest.raises(UnsupportedError, match=reason):
        blocks.init_pipeline()(prompt="a red fox")


def test_mistakes_are_refused(modular):
    """The block's own at once, a call's before it encodes the prompt; the pipeline stays as it was."""
    with pytest.raises(PresetError, match=r"target_eror.*target_error"):
        AccelerateBlock(target_eror=0.1)
    pipe = modular("flux", AccelerateBlock())
    left = attributes(pipe)
    for arguments, reason in (
        ({"preset": "turbos"}, "turbos.*turbo"),
        ({"target_error": -1.0}, "target_error"),
        ({"target_error": 0.1, "target_psnr": 30.0}, "not both"),
        ({"preset": "none", "target_error": 0.1}, "target_error needs a preset, but 'none' runs the plain pipeline"),
    ):
        with pytest.raises(PresetError, match=reason):
            call(pipe, **arguments)
    assert attributes(pipe) == left


def test_saved_blocks_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    (tmp_path / "fast.py").write_text(
        "from diffusers import FluxAutoBlocks\n"
        "from dit_accel import AccelerateBlock\n\n\n"
        "class Fast(FluxAutoBlocks):\n"
        '    block_classes = [AccelerateBlock("turbo"), AccelerateBlock, *FluxAutoBlocks.block_classes]\n'
        '    block_names = ["accelerate", "default", *FluxAutoBlocks.block_names]\n'
    )
    (tmp_path / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "fast.Fast"}}))
    blocks = diffusers.ModularPipelineBlocks.from_pretrained(str(tmp_path), trust_remote_code=True)
    assert [blocks.sub_blocks[name].preset for name in ("accelerate", "default")] == ["turbo", None]
    assert {"preset", "target_error", "target_psnr"} <= {*blocks.input_names}
