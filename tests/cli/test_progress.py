"""Progress of many runs: steps, and the remaining time."""

import io
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from rich.console import Console

from dit_accel.cli import progress as shown
from dit_accel.cli.progress import progress_bar


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@contextmanager
def progress_on(console):
    with progress_bar(console, "plain", "settings") as progress:
        yield progress, progress.watch(SimpleNamespace())


@pytest.fixture
def silent():
    return Console(file=io.StringIO(), force_terminal=True)


def test_what_is_left_goes_by_what_was_done(silent, clock):
    """Nothing is known before the first step; half a setting in 10 s of 3 leaves 50 s; known settings cost nothing."""
    with progress_on(silent) as (progress, pipe):
        progress.begin("plain")
        with pipe.progress_bar(total=4) as bar:
            bar.update()
        assert progress.left is None
        progress.expect(total=5, done=2)
        assert progress.left is None
        progress.begin("turbo", share=0.5)
        clock.seconds += 10
        with pipe.progress_bar(total=4) as bar:
            for _ in range(4):
                bar.update()
        pipe.progress_bar(total=4)  # of the video's next chunk
        assert progress.left == pytest.approx(50)
        progress.begin("plain")  # no part of the count
        assert progress.left == pytest.approx(50)
        list(pipe.progress_bar(range(3)))
        assert progress.left == pytest.approx(50)
        clock.seconds += 30
        progress.expect(total=5, done=3)
        assert progress.left == pytest.approx(80)


@pytest.mark.parametrize("iterable", [True, False], ids=["iterates", "updates"])
def test_a_pipelines_steps_are_told(silent, iterable):
    """Steps are counted if the pipeline iterates over its bar and if it advances it."""
    told = []
    with progress_on(silent) as (progress, pipe):
        progress._step = lambda number, steps: told.append((number, steps))
        progress.watch(pipe)
        if iterable:
            assert list(pipe.progress_bar(range(3))) == [0, 1, 2]
        else:
            with pipe.progress_bar(total=3) as bar:
                bar.set_description("denoising")
                for _ in range(3):
                    bar.update()
    assert list(dict.fromkeys(told)) == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("quiet", [False, True], ids=["told", "quiet"])
def test_a_file_gets_a_line_a_minute(clock, capsys, quiet):
    """A line a minute where no bar can be shown; none on a quiet console."""
    with progress_on(Console(file=io.StringIO(), quiet=quiet)) as (progress, pipe):
        progress.expect(total=2, done=0)
        progress.begin("turbo", share=1.0)
        with pipe.progress_bar(total=4) as bar:
            for _ in range(4):
                clock.seconds += 30
                bar.update()
    lines = capsys.readouterr().err.splitlines()
    expected = ["turbo, step 2 of 4, 0 of 2 settings, about 0:03:00 left", "turbo, step 4 of 4, 1 of 2 settings, "]
    assert len(lines) == (0 if quiet else 2)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=False))
