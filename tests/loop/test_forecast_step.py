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
MOST_CALLS = 130  # of Python functions in a forecast step, torch's and diffusers' included
MOST_FILES = 16  # of the package in a forecast step
MOST_DEPTH = 8  # of the package's functions, one inside the other, in a forecast step
MOST_COMPUTED = 800  # calls of the package's functions in a computed step
MOST_SETUP = 1500  # calls of the package's functions that accelerate a pipeline
SETTLING = 3  # first steps, in which conditions are compared by value


class Calls:
    """Calls of Python functions while a function runs, and how deep the package's functions were nested."""

    def __init__(self, function, *args, **kwargs):
        self.counts: Counter = Counter()
        self.depth = self._now = 0
        sys.setprofile(self._note)
        try:
            self.result = function(*args, **kwargs)
        finally:
            sys.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        is_own = code.co_filename.startswith(PACKAGE)
        if event == "call":
            self.counts[code.co_filename, code.co_qualname] += 1
            self._now += is_own
            self.depth = max(self.depth, self._now)
        elif event == "return":
            self._now -= is_own

    @property
    def own(self):
        """Calls of the package's functions, by file and name."""
        return Counter({each: count for each, count in self.counts.items() if each[0].startswith(PACKAGE)})


@pytest.fixture(scope="module")
def calls():
    """Calls that accelerate FLUX with 57 blocks, and those of each step, with its mode."""
    pipe = tiny_pipeline("flux")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = {**pipe.transformer.config, "num_layers": 19, "num_single_layers": 38}
        pipe.transformer = type(pipe.transformer).from_config(config).eval()
        redraw(pipe.transformer)
    accelerate_pipeline(tiny_pipeline("flux"), "balanced")  # what is looked up once a process
    setup = Calls(accelerate_pipeline, pipe, "balanced")
    forward, found = pipe.transformer.forward, []

    def counted(*args, **kwargs):
        pipe.dit_accel.report()  # reads the measurements of the step before
        found.append(Calls(forward, *args, **kwargs))
        return found[-1].result

    pipe.transformer.forward = counted
    tiny_output(pipe, "flux", steps=20)
    modes = [step.mode for step in pipe.dit_accel.report().steps]
    return setup, [*zip(modes, found, strict=True)][SETTLING:]


@pytest.fixture(scope="module")
def forecasts(calls):
    """Calls of each forecast step."""
    return [each for mode, each in calls[1] if mode == "dispatch"]


def test_a_forecast_step_takes_few_calls_and_crosses_few_files(forecasts):
    """However many blocks there are; its functions are not far inside one another."""
    assert len(forecasts) > 5 and max(each.counts.total() for each in forecasts) <= MOST_CALLS
    assert len({file for file, _ in forecasts[0].own}) <= MOST_FILES
    assert max(each.depth for each in forecasts) <= MOST_DEPTH


def test_a_computed_step_takes_few_calls_of_ours(calls):
    """A call of ours costs microseconds, and a launch-bound step waits for each."""
    assert max(each.own.total() for mode, each in calls[1] if mode != "dispatch") <= MOST_COMPUTED


def test_a_pipeline_is_accelerated_in_few_calls(calls):
    assert calls[0].own.total() <= MOST_SETUP
