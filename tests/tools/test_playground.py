"""The playground without its page: events in order, plain sides that are kept, cancelling, and several at once."""

import threading

import numpy as np
import pytest

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.errors import PresetError, UnsupportedError
from dit_accel.tools.metrics import psnr
from dit_accel.tools.playground import LIMITS, Began, Cancelled, Compared, Made, Playground, Step, Waiting, Wish
from dit_accel.tools.timing import timed_output
from tests.models.tiny import pipeline
from tests.tiny import same_weights, tiny_inputs

STEPS = 6
WISH = Wish("a red fox", "flux", "balanced", target_error=0.9, steps=STEPS)  # random weights forecast badly


def arguments(pipe, model, options):
    """Arguments of a tiny pipeline's call."""
    made = tiny_inputs(model, prompt=options["prompt"], steps=options["steps"])
    return {name: value for name, value in made.items() if name not in ("generator", "output_type")}


class Kitchen:
    """A playground over tiny pipelines, what it loaded, and how often it called them for whole runs.

    With ``gate`` set to an unset flag, calls wait for it.
    """

    def __init__(self):
        self.loaded, self.calls, self.gate = [], 0, threading.Event()
        self.gate.set()
        self.playground = Playground(self.load, arguments, self.call)

    def load(self, model):
        self.loaded.append(model)
        self.pipe = pipeline(model)
        return self.pipe

    def call(self, pipe, given, seed):
        self.gate.wait(60)
        self.calls += given["num_inference_steps"] == STEPS
        return timed_output(pipe, given, seed)


@pytest.fixture
def kitchen():
    made = Kitchen()
    yield made
    made.gate.set()
    made.playground.close()


def last(events, kind):
    return [event for event in events if isinstance(event, kind)][-1]


def picture(events, side):
    """Image of one side, as an array."""
    (made,) = (event for event in events if isinstance(event, Made) and event.side == side)
    return np.asarray(made.output.results[0])


def test_events_tell_both_sides_step_by_step(kitchen):
    """Images equal the pipeline's own calls; modes and errors of the steps are those of the report."""
    events = list(kitchen.playground.start(WISH))
    assert [event.what for event in events if isinstance(event, Began)] == [
        *("loading flux", "warm-up", "plain", "accelerated")
    ]
    for side in ("plain", "accelerated"):
        steps = [event for event in events if isinstance(event, Step) and event.side == side]
        assert [(step.index, step.steps) for step in steps] == [(index, STEPS) for index in range(STEPS)]
    end = events[-1]
    assert [(step.mode, step.error) for step in steps] == [(each.mode, each.error) for each in end.report.steps]
    assert {"full", "update", "dispatch"} == {step.mode for step in steps} and any(step.error for step in steps)
    pipe = pipeline("flux")
    np.testing.assert_array_equal(picture(events, "plain"), expected(pipe))
    accelerate_pipeline(pipe, "balanced", target_error=0.9)
    np.testing.assert_array_equal(picture(events, "accelerated"), expected(pipe))
    restore_pipeline(pipe)
    assert end.psnr == psnr(picture(events, "plain"), picture(events, "accelerated")) and end.speedup > 0


def expected(pipe):
    return np.asarray(
        timed_output(pipe, arguments(pipe, "flux", {"prompt": WISH.prompt, "steps": STEPS}), 0).results[0]
    )


def test_numbers_of_a_wish_are_whole():
    """Part of a step or a pixel is an error that names the argument."""
    for name in ("steps", "height", "num_frames"):
        with pytest.raises(UnsupportedError, match=rf"^{name} must be a whole number, got 33\.7"):
            Wish("a fox", "flux", **{name: 33.7}).require_bounds()


def test_another_target_runs_the_accelerated_side_alone(kitchen):
    """The plain output is cached by prompt, seed and size; another seed makes a new one."""
    first = list(kitchen.playground.start(WISH))
    assert kitchen.calls == 2
    second = list(kitchen.playground.start(Wish(**{**vars(WISH), "target_error": 0.01})))
    assert kitchen.calls == 3
    assert [event.what for event in second if isinstance(event, Began)] == ["accelerated"]
    assert last(second, Made).side == "accelerated" and [e.kept for e in second if isinstance(e, Made)] == [True, False]
    np.testing.assert_array_equal(picture(second, "plain"), picture(first, "plain"))
    assert second[-1].report.computed_fraction > first[-1].report.computed_fraction
    list(kitchen.playground.start(Wish(**{**vars(WISH), "seed": 1})))
    assert kitchen.calls == 5 and kitchen.loaded == ["flux"]


@pytest.mark.parametrize("side", ["plain", "accelerated"])
def test_a_cancelled_run_stops_between_steps_and_leaves_nothing(kitchen, monkeypatch, side):
    """No step follows the current one, offloaded weights go back, and the next run equals that of a fresh process."""
    freed = []
    monkeypatch.setattr(type(pipeline("flux")), "maybe_free_model_hooks", lambda pipe: freed.append(pipe))
    run, seen = kitchen.playground.start(WISH), []
    for event in run:
        seen.append(event)
        if isinstance(event, Step) and (event.side, event.index) == (side, 2):
            run.cancel()
    assert isinstance(seen[-1], Cancelled) and len(freed) == (2 if side == "plain" else 3), "once a call"
    assert last(seen, Step).side == side and last(seen, Step).index < STEPS - 1
    assert not hasattr(kitchen.pipe, "dit_accel") and "progress_bar" not in vars(kitchen.pipe)
    assert not kitchen.pipe.transformer._forward_hooks and not kitchen.pipe.transformer._forward_pre_hooks
    events = list(kitchen.playground.start(WISH))
    fresh = same_weights(kitchen.pipe)
    np.testing.assert_array_equal(picture(events, "plain"), expected(fresh))
    accelerate_pipeline(fresh, "balanced", target_error=0.9)
    np.testing.assert_array_equal(picture(events, "accelerated"), expected(fresh))


def test_two_at_once_come_one_after_the_other(kitchen):
    """The second gets its place in the queue, and each gets its own result."""
    kitchen.gate.clear()
    runs = [kitchen.playground.start(wish) for wish in (WISH, Wish("two whales", *list(vars(WISH).values())[1:]))]
    kitchen.gate.set()
    first, second = (list(run) for run in runs)
    assert not any(isinstance(event, Waiting) for event in first) and second[0] == Waiting(1)
    assert isinstance(first[-1], Compared) and isinstance(second[-1], Compared)
    assert (picture(first, "plain") != picture(second, "plain")).any()
    np.testing.assert_array_equal(picture(first, "plain"), expected(pipeline("flux")))


def test_who_waits_can_leave(kitchen):
    """At once, and nothing of it is computed; those before and behind get theirs."""
    kitchen.gate.clear()
    first, second, third = (kitchen.playground.start(WISH) for _ in range(3))
    second.cancel()
    assert list(second) == [Waiting(1), Cancelled()]
    kitchen.gate.set()
    assert isinstance(list(first)[-1], Compared) and isinstance(list(third)[-1], Compared)
    assert kitchen.calls == 3


def test_models_take_turns(kitchen):
    """Another model is loaded in the place of the first; videos are compared over all frames."""
    list(kitchen.playground.start(WISH))
    before = kitchen.pipe
    events = list(kitchen.playground.start(Wish("a whale", "wan", target_error=0.9, steps=STEPS)))
    assert kitchen.loaded == ["flux", "wan"] and kitchen.pipe is not before
    assert events[-1].preset.name == "video-balanced" and picture(events, "plain").ndim == 4
    assert events[-1].psnr == psnr(picture(events, "plain"), picture(events, "accelerated"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({name: LIMITS[name][1] + 1}, f"{name} must be") for name in LIMITS]
    + [({"prompt": " "}, "prompt must have"), ({"prompt": "a" * 2001}, "got 2,001")],
    ids=[*LIMITS, "no-prompt", "long-prompt"],
)
def test_limits_are_told_before_any_work(kitchen, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        kitchen.playground.start(Wish(**{**vars(WISH), **changes}))
    assert kitchen.loaded == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"preset": "blanced"}, PresetError),
        ({"preset": "wan21-fgattn", "target_error": None}, UnsupportedError),
        ({"preset": "exact"}, PresetError),
    ],
    ids=["unknown", "another-family", "has-no-target"],
)
def test_presets_that_do_not_fit_are_told_before_the_plain_run(kitchen, changes, error):
    run = kitchen.playground.start(Wish(**{**vars(WISH), **changes}))
    with pytest.raises(error):
        list(run)
    assert kitchen.calls == 0
    assert isinstance(list(kitchen.playground.start(WISH))[-1], Compared)
