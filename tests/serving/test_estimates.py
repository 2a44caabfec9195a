"""Memory of a run, estimated before it starts."""

from types import SimpleNamespace

import pytest
import torch

from dit_accel.errors import OutOfMemoryError, UnsupportedError
from dit_accel.models import free_memory
from dit_accel.models.families import chunks
from dit_accel.serving.estimates import USUAL, estimated, require_memory
from dit_accel.serving.pipelines import call_arguments
from dit_accel.tools.steps import watched_steps
from tests.models import tiny
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
    monkeypatch.setattr(free_memory, "read_host_memory", lambda: free_memory.FreeMemory(2 * 2**30, 2**40))
    told = r"pixels.* need at least [1-9][0-9,]* GiB of memory, but cpu has 2 GiB: use a smaller height"
    options = {key.replace("num_images_per_prompt", "num-images").replace("_", "-"): asked[key] for key in asked}
    with pytest.raises(UnsupportedError, match=told):
        call_arguments(tiny_pipeline(name), "some/model", {"prompt": "a fox", **options})
    require_memory(tiny_pipeline(name), {"height": 64, "width": 64, "num_frames": 5})


def test_a_batch_is_counted_by_its_samples_and_the_free_memory(monkeypatch):
    pipe, sizes = tiny_pipeline("flux"), {"height": 64, "width": 64}
    needed = estimated(pipe, sizes)[1]
    monkeypatch.setattr(free_memory, "read_host_memory", lambda: free_memory.FreeMemory(20 * needed, 2**40))
    require_memory(pipe, sizes | {"prompt": ["a fox"] * 3})
    with pytest.raises(OutOfMemoryError, match=r"4 of 64 × 64 pixels need about .* are free; use a smaller batch"):
        require_memory(pipe, sizes | {"prompt": ["a fox"] * 4})


def test_a_plain_batch_counts_its_decoding_as_measured(monkeypatch):
    """In bf16, 2.4 GiB for each FLUX image of 1024² (decoding.json); less if each is decoded by itself."""
    pipe, asked = tiny_pipeline("flux").to(torch.bfloat16), {"height": 1024, "width": 1024, "prompt": ["a fox"] * 4}
    config = SimpleNamespace(block_out_channels=(128, 256, 512, 512))
    pipe.vae, pipe.vae_scale_factor = type("AutoencoderKL", (), {"config": config})(), 8
    monkeypatch.setattr(type(pipe), "_execution_device", torch.device("cuda"))
    assert USUAL * estimated(pipe, asked)[1] / free_memory.GIB == pytest.approx(2.377, abs=1e-3)
    pipe.vae.use_slicing = True
    assert USUAL * estimated(pipe, asked)[1] / free_memory.GIB < 0.1


def test_chunks_of_a_video_are_counted_as_its_pipeline_does():
    cases = {"helios": ({"num_frames": 8}, 3), "wan-animate": ({"segment_frame_length": 5}, 2)}
    cases |= {"diffusion-forcing": ({"num_frames": 13, "overlap_history": 1}, 3), "skyreels-v2": ({"num_frames": 9}, 1)}
    for name, (asked, count) in cases.items():
        pipe, arguments = tiny.built(name)
        arguments, told = {**arguments, **asked, "num_inference_steps": 2}, []
        with watched_steps(pipe, lambda *step, told=told: told.append(step), chunks(pipe, arguments)):
            pipe(**arguments)
        assert list(dict.fromkeys(told)) == [(done, 2 * count) for done in range(2 * count + 1)], name


def test_a_size_that_is_not_known_gives_no_estimate(pipe):
    pipe.default_sample_size = None
    assert estimated(pipe, {}) == ("", 0)
    require_memory(pipe, {})
