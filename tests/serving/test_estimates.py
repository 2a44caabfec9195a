"""Memory and time of a run, estimated before it starts."""

import re

import pytest
import torch

from dit_accel.errors import UnsupportedError
from dit_accel.serving import estimates
from dit_accel.serving.estimates import estimated, long_run_note, require_memory
from dit_accel.serving.pipelines import call_arguments
from tests.tiny import tiny_pipeline


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("flux", {"height": 16384, "width": 16384}),
        ("flux", {"height": 64, "width": 64, "num_images_per_prompt": 10**7}),
        ("wan", {"height": 8192, "width": 8192, "num_frames": 81}),
        ("wan", {"height": 64, "width": 64, "num_frames": 10**7}),
    ],
    ids=["sides", "images", "video", "frames"],
)
def test_a_run_beyond_the_memory_is_refused_before_it_starts(monkeypatch, name, asked):
    """The message has the size, both amounts and what to change."""
    monkeypatch.setattr(estimates, "_memory", lambda place: 2 * 2**30)
    told = r"pixels.* need at least [1-9][0-9,]* GiB of memory, but cpu has 2 GiB: use a smaller height"
    options = {key.replace("num_images_per_prompt", "num-images").replace("_", "-"): asked[key] for key in asked}
    with pytest.raises(UnsupportedError, match=told):
        call_arguments(tiny_pipeline(name), "some/model", {"prompt": "a fox", **options})
    require_memory(tiny_pipeline(name), {"height": 64, "width": 64, "num_frames": 5})


def test_more_pixels_frames_and_steps_need_more():
    pipe = tiny_pipeline("wan")
    asked = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 4}
    base = estimated(pipe, asked)
    for name in asked:
        more = estimated(pipe, asked | {name: 8 * asked[name]})
        assert more.flops > 7 * base.flops and (more.bytes > base.bytes or name == "num_inference_steps")


def test_a_size_that_is_not_known_gives_no_estimate():
    pipe = tiny_pipeline("flux")
    pipe.default_sample_size = None
    assert estimated(pipe, {}) is None and long_run_note(pipe, {}) is None
    require_memory(pipe, {})


@pytest.mark.parametrize(
    ("speed", "told"), [(1e9, r"about [0-9,]+ hours on this CPU"), (1e30, None)], ids=["slow", "quick"]
)
def test_a_long_run_on_a_cpu_is_announced(monkeypatch, speed, told):
    monkeypatch.setattr(estimates, "_flops_per_second", lambda dtype: speed)
    note = long_run_note(tiny_pipeline("flux"), {"height": 16384, "width": 16384, "num_inference_steps": 50})
    assert (note is None) if told is None else re.search(told, note)


def test_the_host_and_its_speed_are_measured():
    assert 2**26 < estimates._memory(torch.device("cpu")) < 2**50
    assert estimates._flops_per_second(torch.float32) > 1e7
