"""Images are converted on the GPU as diffusers converts them, bit for bit."""

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor

from dit_accel.stages import images
from tests.kernels.conftest import DEVICE


class Inverting(VaeImageProcessor):
    pt_to_numpy = staticmethod(lambda images: 1 - VaeImageProcessor.pt_to_numpy(images))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(images, "DEVICES", (DEVICE,))
    monkeypatch.setattr(images, "STAGED", 3 * 2**10)  # most results pass through in parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["np", "pil"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_results_are_those_of_diffusers(kind, dtype, channels):
    generator = torch.Generator(DEVICE).manual_seed(0)
    image = torch.randn(3, channels, 16, 24, generator=generator, device=DEVICE).to(dtype)
    pipe = SimpleNamespace(image_processor=VaeImageProcessor(), video_processor=VideoProcessor())
    videos = torch.stack([image, -image]).transpose(1, 2)
    calls = (
        lambda: pipe.image_processor.postprocess(image, kind),
        lambda: pipe.image_processor.postprocess(image, output_type=kind, do_denormalize=[True, False, True]),
        lambda: pipe.video_processor.postprocess_video(videos[:1], output_type=kind),
        lambda: pipe.video_processor.postprocess_video(videos, kind),
    )
    expected = [call() for call in calls]
    with ExitStack() as undo:
        images.convert_on_gpu(pipe, undo)
        results = [call() for call in calls]
    for ours, theirs in zip(results, expected, strict=True):
        is_same = ours.dtype == theirs.dtype and np.array_equal(ours, theirs) if kind == "np" else ours == theirs
        assert is_same  # modes, sizes and bytes


def test_other_processors_keep_their_code_and_nothing_stays():
    pipe = SimpleNamespace(image_processor=Inverting(), video_processor=VideoProcessor())
    other = SimpleNamespace(video_processor=pipe.video_processor)
    before = [dict(vars(processor)) for processor in (pipe.image_processor, pipe.video_processor)]
    with ExitStack() as undo:
        images.convert_on_gpu(pipe, undo)
        images.convert_on_gpu(other, undo)
        assert vars(pipe.image_processor) == before[0]
        assert {"postprocess", "postprocess_video"} <= set(vars(pipe.video_processor))
    assert [vars(processor) for processor in (pipe.image_processor, pipe.video_processor)] == before


def test_memory_that_cannot_be_pinned_is_pageable(monkeypatch):
    """For example in a container with a limit on locked memory; the bits are the same."""
    image, empty, pinned = torch.rand(3, 3, 16, 24, device=DEVICE), torch.empty, []

    def refuse(*shape, pin_memory=False, **options):
        pinned.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    expected = (255 * image.permute(0, 2, 3, 1)).round().to(torch.uint8)
    assert np.array_equal(images._on_host(image, torch.uint8), expected.cpu()) and pinned == [False, True, False]
