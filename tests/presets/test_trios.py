"""Presets named `quality`, plainly and `turbo` are in that order in work and in quality, on a trained model."""

import functools

import pytest
import torch
from diffusers import FluxPipeline

from dit_accel import accelerate_pipeline, load_preset, preset_names, restore_pipeline
from dit_accel.tools.demo import demo_path
from dit_accel.tools.measure.metrics import psnr

TRIOS = [(name, name.removesuffix("-quality"), name.replace("-quality", "-turbo")) for name in preset_names()]
TRIOS = [trio for trio in TRIOS if trio[0].endswith("-quality") and not trio[0].startswith("video-")]
LOOPS = [("quality", "balanced", "turbo"), ("video-quality", "video-balanced", "video-turbo")]
PROMPT = "a yellow ring over the sea"


@pytest.fixture(scope="module")
def image_of():
    """Make an image with a preset, once, and return its work too."""
    pipe = FluxPipeline.from_pretrained(demo_path("demo-flux"), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": 192, "width": 192, "num_inference_steps": 14, "max_sequence_length": 64}

    @functools.cache
    def make(name):
        finer = {"blocks.size": 64} if "flashomni" in name else {}  # the image has 256 tokens
        accelerate_pipeline(pipe, load_preset(name, model="flux", **finer))
        image = pipe(PROMPT, **size, generator=torch.Generator().manual_seed(0), output_type="np").images[0]
        work = pipe.dit_accel.report().computed_fraction
        restore_pipeline(pipe)
        return image, work

    return make


def test_trios_are_whole():
    """There is no `-quality` without the plain name and `-turbo`."""
    names = set(preset_names())
    assert all(set(trio) <= names for trio in [*TRIOS, *LOOPS])
    assert {turbo for *_, turbo in TRIOS} == {name for name in names if name.endswith("-turbo")} - {"video-turbo"}


@pytest.mark.parametrize("trio", [*TRIOS, *LOOPS], ids=lambda trio: trio[1])
def test_a_trio_holds_its_order(trio, image_of):
    """From quality to turbo there is less work, and the image is farther from the plain one."""
    plain, _ = image_of("exact")
    images, works = zip(*map(image_of, trio), strict=True)
    distances = [psnr(image, plain) for image in images]
    assert works[0] > works[1] > works[2] and distances[0] > distances[1] > distances[2] > 25
