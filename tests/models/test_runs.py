"""Controllers of several callers of one transformer."""

import threading

from dit_accel.models.runs import Runs


class Controller:
    resets = 0

    def reset(self):
        self.resets += 1


class Pipeline:
    pass


def test_threads_that_have_ended_leave_no_controllers():
    """A server may call a transformer from a new thread for each request."""
    runs, turns = Runs(lambda pipeline: Controller()), [threading.Event() for _ in range(8)]

    def call(turn):
        turn.wait()
        runs.of(None)

    threads = [threading.Thread(target=call, args=[turn]) for turn in turns]
    for item in threads:  # all at once, so that each has an identity of its own
        item.start()
    for turn, item in zip(turns, threads, strict=True):
        turn.set()
        item.join()
    assert len(runs.all()) == 2


def test_a_reset_in_a_call_waits_for_its_end():
    """All controllers are reset then, once, and later calls find them as they are."""
    pipeline = Pipeline()
    runs = Runs(lambda pipeline: Controller(), pipeline)
    outer, inner = runs.begin(pipeline), runs.begin(None)
    runs.reset()
    runs.end()
    assert (outer.resets, inner.resets) == (0, 0)
    runs.end()
    assert (outer.resets, inner.resets) == (1, 1)
    again = runs.begin(pipeline)
    runs.end()
    assert again is outer and outer.resets == 1
