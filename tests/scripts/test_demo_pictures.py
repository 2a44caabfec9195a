"""Pixel readers' results on the demo model's images of the README's prompts."""

import pytest
import torch

from dit_accel import accelerate_pipeline
from scripts.demo_training.loading import load_demo
from scripts.demo_training.reading import agreement, read_pictures
from scripts.demo_training.scenes import Group, Scene

STEPS = 16  # of the README's 50, which show no more
SIZE = 256
SHOWN = {
    "two pink stars over the sea at sunset": Scene(
        "sea", "sunset", "single", "centre", (Group("star", "pink", "medium", "plain", 2),)
    ),
}


@pytest.mark.parametrize("prompt", SHOWN)
def test_short_prompts_show_what_they_say(prompt):
    """Values that they leave out have their defaults, forecast steps included."""
    pipe = accelerate_pipeline(load_demo("demo-flux", "float32", "cpu"), "turbo")
    generator = torch.Generator().manual_seed(0)
    sizes = {"height": SIZE, "width": SIZE, "num_inference_steps": STEPS}
    picture = pipe(prompt, generator=generator, output_type="pt", **sizes).images
    assert pipe.dit_accel.report().steps_by_mode["dispatch"] > STEPS / 3
    found = agreement(read_pictures(picture), [SHOWN[prompt]])
    assert set(found.values()) == {1.0}, found
