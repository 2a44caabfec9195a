"""Contracts of requests: floors, budgets and deadlines by a clock that only the pipeline's work moves."""

import random
from types import SimpleNamespace

import pytest

from dit_accel.errors import ArgumentError
from dit_accel.loop import budget, timing
from dit_accel.presets import load_preset
from dit_accel.serving import deadlines
from dit_accel.serving import dispatcher as dispatching
from dit_accel.serving import worker as working
from dit_accel.serving.deadlines import Busy, Times, contract_of
from dit_accel.serving.dispatcher import Dispatcher, Task
from dit_accel.serving.engine import Made
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker
from dit_accel.tools.measure import timing as measuring

STEP, END = 1.0, 2.5  # seconds of a computed step, and of decoding and the file
SETTINGS = {"prompt": "a fox", "seed": 0, "width": 32, "height": 32}


class Asked(Task):
    def __init__(self, clock, steps=12, count=1, **targets):
        jobs = [Job(index, SETTINGS | {"steps": steps}) for index in range(count)]
        super().__init__(jobs, load_preset("balanced", **targets), ".png")
        self.deadline, self.made, self.error = targets.get("max_seconds"), [], None

    def tell(self, event):
        if isinstance(event, Made):
            self.made.append(event)
        elif not isinstance(event, dispatching.Step):
            self.error = event


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test or a pipeline says so."""
    now = SimpleNamespace(seconds=1000.0)
    fake = SimpleNamespace(monotonic=lambda: now.seconds, perf_counter=lambda: now.seconds)
    for module in (budget, timing, measuring, dispatching, deadlines, working):
        monkeypatch.setattr(module, "time", fake)
    return now


@pytest.fixture
def ask(saved, clock):
    """Runs a request after some seconds in the queue; returns it, or the error that refuses it."""
    worker = Worker(Setup(str(saved("flux"))))
    take = lambda seconds: lambda *_: setattr(clock, "seconds", clock.seconds + seconds)  # noqa: E731
    worker.pipe.transformer.transformer_blocks[0].register_forward_hook(take(STEP))
    worker.pipe.vae.decoder.register_forward_hook(take(END))
    dispatcher = Dispatcher([], 4)

    def run(waits=0.0, **targets):
        task = Asked(clock, **targets)
        try:
            dispatcher.add(task)
        except ArgumentError as error:
            return error
        clock.seconds += waits
        dispatcher._waiting.clear()
        dispatcher._run(worker, task)
        return task if task.error is None else task.error

    return run


def computed(task):
    return [made.contract["computed_steps"] for made in task.made]


def test_contracts_are_kept_or_refused(ask, pytestconfig):
    """Every statement of an answer is true, and no accepted deadline is missed by more than a computed step."""
    draw, least = random.Random(0), 3 * STEP + END
    ask()  # its seconds are those of the size from now on
    floor = {psnr: computed(ask(target_psnr=psnr))[0] for psnr in (20.0, 30.0)}
    for _ in range(200 if pytestconfig.getoption("--release") else 14):
        waits, limit = draw.choice([0.0, draw.uniform(0, 6)]), draw.choice([None, draw.uniform(4, 20)])
        targets = draw.choice([{}, {"target_psnr": draw.choice([*floor])}, {"computed_steps": draw.randint(3, 12)}])
        found = ask(waits, **targets, **({"max_seconds": limit} if limit else {}))
        if limit is not None and limit < waits + least:
            assert isinstance(found, ArgumentError if limit < least else Busy)
            assert f"{least if limit < least else waits + least:.3g}" in str(found)
            continue
        (made,) = found.made
        contract, seconds = made.contract, made.contract["queue_seconds"] + made.contract["run_seconds"]
        assert contract["queue_seconds"] == pytest.approx(waits) and contract["steps"] == 12
        assert contract["run_seconds"] == pytest.approx(contract["computed_steps"] * STEP + END)
        if limit is not None:
            assert seconds <= limit + STEP and contract["deadline_met"] == (seconds <= limit)
        needed = floor.get(targets.get("target_psnr"), targets.get("computed_steps"))
        decides = contract["decided_by"]
        if needed is None:
            assert decides == ("preset" if limit is None else "deadline")
        elif decides == "deadline":
            assert contract["computed_steps"] <= needed + 1 and seconds > limit - 2 * STEP
        else:
            assert contract["computed_steps"] == needed
            assert decides == ("floor" if "target_psnr" in targets else "budget")
        if "target_psnr" in targets:
            assert contract["floor_met"] == (decides == "floor")


def test_images_of_a_request_share_its_deadline(ask):
    ask()
    two = ask(count=2, max_seconds=18.0)
    assert computed(two) == [6, 7] and two.made[-1].contract["deadline_met"]  # the second also has the first's rest
    assert "must be at least 11" in str(ask(count=2, max_seconds=10.0))


def test_equal_deadlines_do_not_accelerate_anew(ask, monkeypatch):
    started = []
    start = working.start_pipeline
    monkeypatch.setattr(working, "start_pipeline", lambda *call: started.append(start(*call)))
    for waits in (0.0, 1.0, 2.0):
        ask(waits, max_seconds=12.0)
    assert len(started) == 1


def test_a_plain_run_states_its_seconds(clock):
    task = SimpleNamespace(preset=None, deadline=None, created=clock.seconds - 3.0)
    stated = contract_of(task, Made(b"", 1.0, None, [0]), clock.seconds - 1.0)
    assert stated == {"queue_seconds": 2.0, "run_seconds": 1.0, "decided_by": "preset"}


def test_times_of_few_sizes_are_kept(monkeypatch):
    monkeypatch.setattr(deadlines, "KEPT", 2)
    times, task = Times(), SimpleNamespace(preset=None, model=None)
    for width in (16, 32, 48):
        times.take(task, [Job(0, {"width": width})], Made(b"", 1.0, None, [0]), 2.0)
    assert [key[4] for key in times._latest] == [32, 48]


def test_times_forget_a_slow_first_run_and_follow_the_machine(clock):
    times, job = Times(), Job(0, SETTINGS)
    task = SimpleNamespace(preset=None, model=None, deadline=6.0, created=clock.seconds)

    def takes(*seconds):
        [times.take(task, [job], Made(b"", 1.0, None, [0]), each) for each in seconds]
        return times.limited(task, [job], 1)[0].settings["deadline"]

    assert takes(30.0, 3.0) == (6.0, 2.0) and takes(4.0, 5.0, 3.0) == (6.0, 4.0)
    with pytest.raises(ArgumentError, match=r"at least 8 for"):
        takes(*[8.0] * 3)
