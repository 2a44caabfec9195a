"""A forecast step is a weighted sum and a page of book-keeping, however many blocks the model has."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import dit_accel
from dit_accel import accelerate_pipeline
from tests.tiny import redraw, tiny_output, tiny_pipeline

PACKAGE = str(Path(dit_accel.__file__).parent)
MOST_CALLS = 400  # of Python functions, torch's and diffusers' included
MOST_FILES = 21  # of the package


@pytest.fixture(scope="module")
def steps():
    """Mode of each step of FLUX with 57 blocks, and how often it calls each function."""
    pipe = tiny_pipeline("flux")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        kind = type(pipe.transformer)
        config = {**pipe.transformer.config, "num_layers": 19, "num_single_layers": 38}
        pipe.transformer = kind.from_config(config).eval()
        redraw(pipe.transformer)
    accelerate_pipeline(pipe, "balanced")
    forward, found = pipe.transformer.forward, []

    def counted(*args, **kwargs):
        calls: Counter = Counter()
        found.append(calls)

        def note(frame, event, _):
            if event == "call":
                calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

        sys.setprofile(note)
        try:
            return forward(*args, **kwargs)
        finally:
            sys.setprofile(None)

    pipe.transformer.forward = counted
    tiny_output(pipe, "flux", steps=20)
    return [(step.mode, calls) for step, calls in zip(pipe.dit_accel.report().steps, found, strict=True)]


def test_a_forecast_step_takes_few_calls(steps):
    """Python overhead does not grow with the number of blocks."""
    forecast = [calls for mode, calls in steps if mode == "dispatch"]
    assert len(forecast) > 5
    assert max(calls.total() for calls in forecast) <= MOST_CALLS


def test_a_forecast_step_crosses_few_files(steps):
    """Somebody who follows a forecast step reads few files."""
    forecast = next(calls for mode, calls in steps if mode == "dispatch")
    assert len({file for file, _ in forecast if file.startswith(PACKAGE)}) <= MOST_FILES
