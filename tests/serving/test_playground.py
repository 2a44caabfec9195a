"""The playground without its page: states in order, plain sides that are kept, runs that end early or wait."""

import threading
import time

import numpy as np
import pytest

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.errors import ArgumentError, PresetError
from dit_accel.serving import pipelines, playground, worker
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.playground import LIMITS, Playground, Wish
from dit_accel.tools.measure.metrics import psnr
from dit_accel.tools.measure.timing import timed_output
from tests.models.tiny import pipeline
from tests.tiny import same_weights, tiny_inputs

STEPS = 6
WISH = Wish("a red fox", "flux", "balanced", target_error=0.9, steps=STEPS)  # random weights forecast badly


def arguments(pipe, model, options, *_):
    made = tiny_inputs(model, prompt=options["prompt"], steps=options["steps"])
    return {name: value for name, value in made.items() if name not in ("generator", "output_type")}


class Kitchen:
    """A playground over tiny pipelines that counts loads and whole runs; calls wait for ``gate``, an unset flag."""

    def __init__(self):
        self.loaded, self.calls, self.gate = [], 0, threading.Event()
        self.gate.set()
        self.playground = Playground(lambda model: worker.Worker(Setup(model, "none")))

    def load(self, model, *_):
        self.loaded.append(model)
        self.pipe = pipeline(model)
        return self.pipe

    def call(self, pipe, given, seed):
        self.gate.wait(60)
        self.calls += given["num_inference_steps"] == STEPS
        return timed_output(pipe, given, seed)

    def compare(self, **changes):
        return list(self.playground.compare(Wish(**{**vars(WISH), **changes})))[-1]


@pytest.fixture
def kitchen(monkeypatch):
    made = Kitchen()
    monkeypatch.setattr(pipelines, "load_pipeline", made.load)
    monkeypatch.setattr(worker, "call_arguments", arguments)
    monkeypatch.setattr(worker, "timed_call", made.call)
    monkeypatch.setattr(playground, "REFRESH", 0.001)
    yield made
    made.gate.set()
    made.playground.close()


def image(run, side):
    return np.asarray(run.outputs[side].results[0])


def expected(pipe):
    made = timed_output(pipe, arguments(pipe, "flux", {"prompt": WISH.prompt, "steps": STEPS}), 0)
    return np.asarray(made.results[0])


def test_a_run_shows_both_sides_step_by_step(kitchen):
    """Images equal the pipeline's own calls; modes and errors of the steps are those of the report."""
    activities, lengths, ends = [], [], []
    for run in kitchen.playground.compare(WISH):
        ends.append(run.comparison is not None)
        activities.append(run.activity.partition(":")[0])
        lengths.append([len(steps) for steps in run.steps.values()])
    assert list(dict.fromkeys(activities)) == ["loading flux", "warm-up", "plain", "accelerated"]
    assert lengths == sorted(lengths) and lengths[-1] == [STEPS, STEPS] and run.total == STEPS
    assert ends == [False] * (len(ends) - 1) + [True], "the page adds it to the history"
    end = run.comparison
    assert run.steps["accelerated"] == [(each.mode, each.error) for each in end.report.steps]
    assert {mode for mode, _ in run.steps["accelerated"]} == {"full", "update", "dispatch"}
    assert any(error for _, error in run.steps["accelerated"]) and run.steps["plain"] == [("full", None)] * STEPS
    pipe = pipeline("flux")
    np.testing.assert_array_equal(image(run, "plain"), expected(pipe))
    np.testing.assert_array_equal(np.asarray(run.preview), image(run, "plain"))
    accelerate_pipeline(pipe, "balanced", target_error=0.9)
    np.testing.assert_array_equal(image(run, "accelerated"), expected(pipe))
    restore_pipeline(pipe)
    assert end.psnr == psnr(image(run, "plain"), image(run, "accelerated")) and end.speedup > 0


def test_steps_of_all_chunks_are_shown(kitchen):
    run = kitchen.compare(model="framepack")
    steps, latest = run.steps["accelerated"], [(each.mode, each.error) for each in run.comparison.report.steps]
    assert run.total == len(steps) == len(run.steps["plain"]) == 2 * STEPS
    assert steps[STEPS:] == latest and {mode for mode, _ in steps[:STEPS]} == {"full", "update", "dispatch"}


def test_another_target_runs_the_accelerated_side_alone(kitchen):
    """The plain output is cached by prompt, seed and size; another seed makes a new one."""
    first = kitchen.compare()
    assert kitchen.calls == 2 and not first.is_kept
    second = kitchen.compare(target_error=0.01)
    assert kitchen.calls == 3 and second.is_kept and "plain" not in second.steps and second.preview is None
    np.testing.assert_array_equal(image(second, "plain"), image(first, "plain"))
    assert second.comparison.report.computed_fraction > first.comparison.report.computed_fraction
    kitchen.compare(seed=1)
    assert kitchen.calls == 5 and kitchen.loaded == ["flux"]


@pytest.mark.parametrize("end", ["closed", "playground"])
@pytest.mark.parametrize("side", ["plain", "accelerated"])
def test_a_run_that_is_closed_stops_between_steps_and_leaves_nothing(kitchen, monkeypatch, side, end):
    """No step follows the current one, offloaded weights go back, and the next run equals that of a fresh process."""
    freed, go_on, call = [], threading.Event(), worker.Worker.call
    monkeypatch.setattr(type(pipeline("flux")), "maybe_free_model_hooks", lambda pipe: freed.append(pipe))

    def slowly(self, batch, tell, *rest):
        def wait(done, total):
            tell(done, total)
            if total == STEPS and done == 3 and hasattr(self.pipe, "dit_accel") == (side == "accelerated"):
                assert go_on.wait(60)

        return call(self, batch, wait, *rest)

    monkeypatch.setattr(worker.Worker, "call", slowly)
    runs = kitchen.playground.compare(WISH)
    run = next(run for run in runs if len(run.steps.get(side, ())) == 3)
    threading.Timer(0.2, go_on.set).start()
    if end == "closed":
        runs.close()
    else:
        kitchen.playground.close()
        assert [each.comparison for each in runs][-1:] == [None]
    assert len(run.steps[side]) == 3 and len(freed) == (2 if side == "plain" else 3), "once a call"
    assert not hasattr(kitchen.pipe, "dit_accel") and "progress_bar" not in vars(kitchen.pipe)
    assert not kitchen.pipe.transformer._forward_hooks and not kitchen.pipe.transformer._forward_pre_hooks
    whole, fresh = kitchen.compare(), same_weights(kitchen.pipe)
    np.testing.assert_array_equal(image(whole, "plain"), expected(fresh))
    accelerate_pipeline(fresh, "balanced", target_error=0.9)
    np.testing.assert_array_equal(image(whole, "accelerated"), expected(fresh))


def test_two_at_once_come_one_after_the_other(kitchen):
    """Each gets its own result, and one that is closed while it waits loads and computes nothing."""
    kitchen.gate.clear()
    changes = ({"prompt": "a"}, {"prompt": "b"}, {"model": "wan", "preset": None})
    first, second, third = (kitchen.playground.compare(Wish(**{**vars(WISH), **each})) for each in changes)
    next(first)
    ends = {}
    threads = [threading.Thread(target=lambda: ends.update(second=list(second)[-1]))]
    next(third)
    threads.append(threading.Thread(target=third.close))
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    kitchen.gate.set()
    one = list(first)[-1]
    for thread in threads:
        thread.join(60)
    assert (image(one, "plain") != image(ends["second"], "plain")).any()
    assert kitchen.calls == 4 and kitchen.loaded == ["flux"]


def test_models_take_turns(kitchen):
    """Another model is loaded in the place of the first; videos are compared over all frames."""
    kitchen.compare()
    before = kitchen.pipe
    run = kitchen.compare(prompt="a whale", model="wan", preset=None)
    assert kitchen.loaded == ["flux", "wan"] and kitchen.pipe is not before
    assert kitchen.playground.pipe("wan") is kitchen.pipe and kitchen.playground.pipe("flux") is None
    assert run.comparison.preset.name == "video-balanced" and image(run, "plain").ndim == 4
    assert run.comparison.psnr == psnr(image(run, "plain"), image(run, "accelerated"))
    assert run.preview.size == run.medium.still(run.outputs["plain"].results[0]).size


@pytest.mark.parametrize(
    ("changes", "message"),
    [({name: LIMITS[name][1] + 1}, f"{name}: must be") for name in LIMITS]
    + [({name: 33.7}, rf"^{name}: must be a whole number, got 33\.7") for name in ("steps", "height", "num_frames")]
    + [({"prompt": " "}, "prompt: must have"), ({"prompt": "a" * 2001}, "got 2,001")],
    ids=[*LIMITS, "part-of-a-step", "part-of-a-pixel", "part-of-a-frame", "no-prompt", "long-prompt"],
)
def test_limits_are_told_before_any_work(kitchen, changes, message):
    with pytest.raises(ArgumentError, match=message):
        kitchen.compare(**changes)
    assert kitchen.loaded == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"preset": "blanced"}, PresetError),
        ({"preset": "wan21-fgattn", "target_error": None}, ArgumentError),
        ({"preset": "exact"}, PresetError),
    ],
    ids=["unknown", "another-family", "has-no-target"],
)
def test_presets_that_do_not_fit_are_told_before_the_plain_run(kitchen, changes, error):
    with pytest.raises(error):
        kitchen.compare(**changes)
    assert kitchen.calls == 0 and kitchen.compare().comparison
