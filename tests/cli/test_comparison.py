"""Both sides of one image, timed alternately."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dit_accel.cli import comparison
from dit_accel.cli.comparison import Side, Sides, both_sides
from dit_accel.cli.progress import Progress
from dit_accel.errors import UnsupportedError
from dit_accel.presets import load_preset
from dit_accel.tools.measure import timing
from dit_accel.tools.measure.repeats import PLAIN_STEPS
from dit_accel.tools.measure.timing import Output
from tests.tiny import tiny_pipeline

STEPS = 6


def sides(plain, fast):
    return Sides(*(Side(Output([], 9.0, each[0], STEPS), each) for each in (plain, fast)), None)


def test_a_disturbed_time_changes_no_speedup():
    """The speed-up is the median of neighbours' ratios, shown with the spread; seconds are medians; a note says so."""
    shaken = sides([4.0, 4.0, 4.0], [2.0, 80.0, 2.0])
    assert str(shaken.speedup) == "2.00× (0.05 to 2.00)" and (shaken.plain.seconds, shaken.fast.seconds) == (4.0, 2.0)
    assert ["raise --repeats" in remark for remark in shaken.remarks()] == [True]
    assert sides([4.0, 4.1], [2.0, 2.1]).remarks() == [] == Sides(shaken.plain, None, None).remarks()


def test_plain_repeats_are_a_few_steps():
    """They represent a whole run; the pipeline is plain again afterwards."""
    pipe, seen = tiny_pipeline("flux"), []
    pipe.transformer.register_forward_hook(lambda *_: seen.append(1))
    arguments = {"prompt": "a", "num_inference_steps": STEPS, "height": 32, "width": 32}
    made = both_sides(pipe, arguments, 0, load_preset("exact"), 2, Console(quiet=True), whole=False)
    assert len(seen) == 2 + 3 * STEPS + PLAIN_STEPS and not hasattr(pipe, "dit_accel"), "2 of them for the warm-up"
    assert len(made.plain.repeats) == len(made.fast.repeats) == 2
    assert made.plain.repeats[0] == made.plain.output.denoising_seconds and min(made.plain.repeats) > 0
    assert made.report.computed_fraction == 1.0


def test_a_preset_that_does_not_fit_is_told_before_any_run():
    """The error comes before the plain run, which may take minutes."""
    pipe, seen = tiny_pipeline("sd3"), []
    pipe.transformer.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(UnsupportedError, match="is for flux models"):
        both_sides(pipe, {"prompt": "a"}, 0, load_preset("flux-fora"), 3, Console(quiet=True), whole=False)
    assert seen == []


@pytest.mark.parametrize("whole", [False, True], ids=["a few steps", "whole runs"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_repeats_are_seconds_of_whole_runs(monkeypatch, whole, device):
    """Plain repeats of a few steps are scaled to a whole run; on a GPU kernels compile in a run that is not timed."""
    pipe, called, denoised, expected = tiny_pipeline("flux"), [], [], []
    pipe_device = type("Pipe", (type(pipe),), {"_execution_device": torch.device(device)})
    pipe.__class__ = pipe_device

    def call(pipe, arguments, seed):
        called.append((hasattr(pipe, "dit_accel"), arguments.get("num_inference_steps"), seed))
        return Output([], 9.0, 8.0, 50 if hasattr(pipe, "dit_accel") else 40)

    @contextmanager
    def clock(pipe):
        yield SimpleNamespace(loop_seconds=3.0, calls=10)

    monkeypatch.setattr(comparison, "timed_call", call)
    monkeypatch.setattr(timing, "transformer_clock", clock)
    monkeypatch.setattr(timing, "denoise", lambda pipe, arguments, seed, steps: denoised.append(steps))
    monkeypatch.setattr(Progress, "expect", lambda self, total, done: expected.append(total))
    arguments, console = {"num_inference_steps": 20}, Console(quiet=True)
    made = both_sides(pipe, arguments, 5, load_preset("exact"), 3, console, whole=whole)
    compiles = [(True, 20, 5)] if device == "cuda" else []
    assert called == [(False, 2, 5), (False, 20, 5), *compiles, (True, 20, 5)]
    assert denoised == [None if whole else PLAIN_STEPS, None] * 2
    assert (made.plain.repeats, made.fast.repeats) == ([8.0, 12.0, 12.0], [8.0, 15.0, 15.0])
    assert expected == [1 + len(compiles) + 3 + 2 * whole], "runs of whole length"


def test_each_result_is_compared_with_its_own():
    """Of several results, with the sounds of both sides; without a comparison the side that ran is written."""
    plain, fast = (
        Side(Output([f"{side} 0", f"{side} 1"], 9.0, 4.0, 2, sounds=[f"{side} sound 0", f"{side} sound 1"]), [4.0])
        for side in ("plain", "fast")
    )
    written = []
    medium = SimpleNamespace(
        write=lambda *given: written.append(given) or [given[1]],
        write_comparison=lambda *given: written.append(given) or [f"{given[3]} compared"],
    )
    comparison.write_results(medium, Sides(plain, None, None), ["a", "b"])
    assert written == [("plain 0", "a", "plain sound 0"), ("plain 1", "b", "plain sound 1")]
    del written[:]
    files = comparison.write_results(medium, Sides(plain, fast, None), ["a", "b"])
    labels = ("plain: call 9.0 s", "accelerated: call 9.0 s")
    assert files == ["a", "a compared", "b", "b compared"]
    for place, name in enumerate("ab"):
        sounds = f"plain sound {place}", f"fast sound {place}"
        assert written[2 * place] == (f"fast {place}", name, sounds[1])
        assert written[2 * place + 1] == (f"plain {place}", f"fast {place}", labels, name, sounds)
