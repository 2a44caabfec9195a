"""Requests that share a call: which, their results and ends, and what follows if such a call fails."""

import io
import threading
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
from PIL import Image

from dit_accel.errors import BatchError, OutOfMemoryError, UnsupportedError
from dit_accel.loop.report import TOGETHER
from dit_accel.presets import load_preset
from dit_accel.serving.dispatcher import Cancelled, Dispatcher, Group, Step, Task
from dit_accel.serving.engine import Made
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import PARTIAL_IMAGES, STREAM, Job
from dit_accel.serving.sharing import Sharing
from dit_accel.serving.worker import Worker

SMALL = {"steps": 8, "height": 32, "width": 32}
ERRORS = {"bad": UnsupportedError, "died": BatchError, "defect": ZeroDivisionError}


class Asked(Task):
    """A request by its prompt; `seed` None = another one for each."""

    def __init__(self, prompt, seed=None, count=1, preset=None, suffix=".png", deadline=None, model=None, **settings):
        first = 1000 * sum(map(ord, prompt)) if seed is None else seed
        jobs = [Job(at, {"prompt": prompt, "seed": first + at, **SMALL, **settings}) for at in range(count)]
        super().__init__(jobs, preset, suffix)
        self.deadline, self.model, self.made, self.ends, self.ended = deadline, model, [], [], threading.Event()

    def tell(self, event):
        if isinstance(event, Made):
            self.made.append(event)
        elif not isinstance(event, Step):
            self.ends.append(event)
            self.ended.set()


class Held:
    """A worker whose first call waits until all requests are there; prompts that start with an error's name fail."""

    loaded = SimpleNamespace(form=None)

    def __init__(self):
        self.calls, self.restarts, self.go_on, self.in_step = [], 0, threading.Event(), lambda: None

    def restart(self):
        self.restarts += 1

    def run(self, jobs, preset, suffix, tell):
        prompts = [job.settings["prompt"] for job in jobs]
        self.calls.append("".join(prompts) if len(jobs) > 1 else prompts[0])
        assert self.go_on.wait(60)
        tell(1, 2)
        if len(self.calls) > 1:
            self.in_step()
        tell(2, 2)
        for prompt in filter(ERRORS.get, prompts):
            raise ERRORS[prompt](prompt)
        if len(jobs) > 2 and "large" in prompts:
            raise OutOfMemoryError("large")
        report = {"steps": [], "notes": [f"{TOGETHER}: why"]} if len(jobs) > 1 and "x" in prompts else None
        return [Made(prompt.encode(), 0.0, report, [job.index for job in jobs]) for prompt in prompts]


@pytest.fixture
def serve():
    """Runs requests, of which the first one runs alone while the others wait; returns the prompts of each call."""

    def run(*tasks, size=4, workers=1, during=None):
        held = [Held() for _ in range(workers)]
        queue = Dispatcher(held, 99, size)
        queue.add(first := Asked("first"))
        while not queue.running:
            pass
        for task in tasks:
            queue.add(task)
        for each in held:
            each.in_step = during or each.in_step
            each.go_on.set()
        assert all(task.ended.wait(60) for task in (first, *tasks))
        queue.stop(10.0)
        return held[0].calls[1:]

    return run


def texts(*tasks):
    return [[made.data.decode() for made in task.made] for task in tasks]


def test_waiting_requests_share_calls_in_their_order(serve):
    """Each gets its own results; several images of one request count, and share a call unless they are too many."""
    tasks = [Asked(letter, count=count) for letter, count in zip("abcdef", (1, 1, 3, 1, 5, 1), strict=True)]
    assert serve(*tasks) == ["abdf", "ccc", *"eeeee"]
    assert texts(*tasks) == [["a"], ["b"], ["c"] * 3, ["d"], ["e"] * 5, ["f"]]
    assert all(task.ends == [None] for task in tasks)
    sizes = [[len(made.batch) for made in task.made] for task in tasks]
    assert sizes == [[4], [4], [3] * 3, [4], [1] * 5, [4]]
    assert serve(Asked("a"), Asked("b"), size=1) == ["a", "b"]


ADAPTIVE = load_preset("balanced")
OTHERS = {
    "size": {"height": 48},
    "steps": {"steps": 9},
    "guidance": {"guidance": 2.0},
    "a negative prompt": {"negative-prompt": "red"},
    "LoRAs": {"loras": {"ring": 0.8}},
    "preset": {"preset": load_preset("turbo")},
    "target": {"preset": load_preset("balanced", target_error=0.5)},
    "plain": {"preset": None},
    "file": {"suffix": ".jpg"},
    "seed": {"seed": 1000 * ord("a")},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_requests_that_differ_do_not_share(serve, other):
    """A third request, equal to the first, overtakes the one that differs."""
    tasks = [Asked("a", preset=ADAPTIVE), Asked("b", **{"preset": ADAPTIVE} | other), Asked("c", preset=ADAPTIVE)]
    assert serve(*tasks) == ["ac", "b"]


ALONE = {
    "deadline": {"deadline": 60.0},
    "stream": {STREAM: True},
    "input image": {"image": "an image"},
    "partial images": {PARTIAL_IMAGES: 1},
    "decided together": {"preset": load_preset("balanced", per_prompt=False)},
    "kept masks": {"preset": load_preset("balanced", **{"forecast.level": "layer"})},
    "seconds of the preset": {"preset": load_preset("balanced", max_seconds=9.0)},
}


@pytest.mark.parametrize("settings", ALONE.values(), ids=ALONE)
def test_some_requests_share_no_call(serve, settings):
    assert serve(Asked("a", count=2, **settings), Asked("b", **settings)) == ["a", "a", "b"]


def test_an_idle_worker_gets_its_part_and_the_bound_of_a_size_only_falls():
    """Whichever of two workers' calls fails last."""
    tasks, sharing = [Asked(letter) for letter in "abcdefg"], Sharing(4)
    assert [len(sharing.chosen(tasks[0], tasks, idle)) for idle in (0, 1, 2, 6)] == [4, 4, 3, 0]
    for most in (2, 3):
        sharing.lower(tasks[0], most, "why")
    assert len(sharing.chosen(tasks[0], tasks, 0)) == 2


def test_a_video_that_is_deleted_meanwhile_leaves_its_call_to_the_others():
    first, *others = tasks = [Asked(letter) for letter in "abc"]
    assert first.common == others[0].common
    first.jobs = []
    group = Group(Sharing(4).chosen(first, tasks, 0), None)
    assert group.left == others and group.jobs == [job for task in others for job in task.jobs]


def test_a_task_that_ends_leaves_the_memory_at_once():
    task = ref(Asked("a"))
    assert task() is None


def test_a_task_may_begin_again_while_its_group_ends():
    assert Group([task := Asked("a")], None).context.run(task.context.run, len, "ab") == 2


def test_a_cancelled_request_leaves_its_neighbours(serve):
    """One cancelled while it waits is in no call; the call of those that run ends once all are cancelled."""
    waiting, left, stays = Asked("a"), Asked("b"), Asked("c")
    waiting.cancel()
    assert serve(waiting, left, stays, during=left.cancel) == ["bc"]
    assert isinstance(left.ends[0], Cancelled) and stays.ends == [None] and texts(stays) == [["c"]]
    both = Asked("a"), Asked("b")
    assert serve(*both, during=lambda: [task.cancel() for task in both]) == ["ab"]
    assert all(isinstance(task.ends[-1], Cancelled) and not task.made for task in both)


@pytest.mark.parametrize("name", ERRORS)
def test_a_bad_request_fails_alone(serve, name):
    """Its neighbours get their results; fewer share a call if their number may be the reason."""
    later = ["def"] if name == "defect" else ["de", "f"]
    tasks = [Asked("a"), Asked(name), *map(Asked, "bcdef")]
    assert serve(*tasks) == [f"a{name}bc", "a", name, "b", "c", *later]
    assert [type(task.ends[-1]) for task in tasks] == [type(None), ERRORS[name]] + [type(None)] * 5


def test_fewer_share_where_memory_is_short(serve, caplog):
    """No request fails."""
    tasks = [Asked("a"), Asked("large"), *map(Asked, "bcdefg")]
    assert serve(*tasks) == ["alargebc", "a", "large", "b", "c", "de", "fg"]
    assert all(task.ends == [None] for task in tasks) and "make at most 2 from now on: large" in caplog.text


def test_samples_that_can_not_be_decided_apart_share_no_later_call(serve):
    assert serve(*map(Asked, "xyab"), size=2) == ["xy", "a", "b"]


@pytest.mark.parametrize("targets", [{"target_error": 0.06}, {"computed_steps": 4}], ids=["adaptive", "a budget"])
def test_images_equal_those_made_alone(saved, targets):
    """Up to rounding, with the steps and the statement of each; a call of one sample changes no preset."""
    worker, made = Worker(Setup(str(saved("flux")), batch_size=2)), {}
    for size in (1, 2):
        tasks = [Asked(text, preset=load_preset("balanced", **targets)) for text in ("a fox", "a red hen")]
        queue, tasks[1].created = Dispatcher([], 4, size), tasks[1].created - 9.0
        for task in [Group(tasks, queue._retry)] if size == 2 else tasks:
            assert queue._run(worker, task)
        made[size] = [task.made[0] for task in tasks]
        assert worker.loaded.preset.schedule.per_prompt
    for alone, shared in zip(made[1], made[2], strict=True):
        first, second = (np.asarray(Image.open(io.BytesIO(each.data)), dtype=int) for each in (alone, shared))
        assert abs(first - second).max() <= 1 and len(shared.batch) == 2
        assert [step["mode"] for step in shared.report["steps"]] == [step["mode"] for step in alone.report["steps"]]
        assert all(alone.contract[name] == shared.contract[name] for name in ("steps", "computed_steps", "decided_by"))
        assert (shared.contract["queue_seconds"] > 9.0) == (shared is made[2][1])
