"""Progress of a command with many runs: the step of the current run, and the time left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import typer
from rich.console import Console

from dit_accel.tools.steps import StepBar

LINE_EVERY = 60.0  # seconds between lines where no bar can be shown, e.g. in a file


class Progress:
    """One bar for many runs, or ``lines`` now and then. The time left is estimated from the pace so far."""

    def __init__(self, bar: Any, begun: str, unit: str, *, lines: bool = False) -> None:
        self._bar = bar
        self._task = bar.add_task(begun, total=None, step="", left="")
        self._what, self._unit, self._lines = begun, unit, lines
        self._total: float | None = None
        self._share = self._done = self._of_run = 0.0
        self._pace_from: tuple[float, float] | None = None  # time of the first `expect`, and units done then
        self._told_at = time.monotonic()

    def expect(self, total: float, done: float) -> None:
        if self._pace_from is None:
            self._pace_from = time.monotonic(), done
        self._total, self._done, self._of_run = total, done, 0.0
        self._tell("")

    def begin(self, what: str, share: float = 0.0) -> None:
        self._done, self._of_run = self._done + self._of_run, 0.0
        self._what, self._share = what, share
        self._tell("")

    def watch(self, pipe: Any) -> Any:
        pipe.progress_bar = partial(StepBar, self._step)
        return pipe

    @property
    def left(self) -> float | None:
        if self._pace_from is None or self._total is None:
            return None
        started, before = self._pace_from
        done = self._done + self._of_run
        return (time.monotonic() - started) / (done - before) * (self._total - done) if done > before else None

    def _step(self, number: int, steps: int) -> None:
        self._of_run = max(self._of_run, self._share * number / steps)  # chunks of a video have loops of their own
        self._tell(f"step {number} of {steps}")

    def _tell(self, step: str) -> None:
        left = "" if self.left is None else f"about {timedelta(seconds=round(max(self.left, 0)))} left"
        done = self._done + self._of_run
        self._bar.update(self._task, description=self._what, completed=done, total=self._total, step=step, left=left)
        if self._lines and time.monotonic() - self._told_at >= LINE_EVERY:
            self._told_at = time.monotonic()
            count = f"{int(done)} of {self._total:g} {self._unit}" if self._total else ""
            typer.echo(", ".join(filter(None, (self._what, step, count, left))), err=True)


@contextmanager
def progress_bar(console: Console, begun: str, unit: str) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    steps, left = (TextColumn(f"{{task.fields[{name}]}}") for name in ("step", "left"))
    columns = (TextColumn("{task.description}"), steps, BarColumn(), MofNCompleteColumn(), unit)
    hidden = console.quiet or not console.is_terminal
    with Bar(*columns, TimeElapsedColumn(), left, console=console, transient=True, disable=hidden) as bar:
        yield Progress(bar, begun, unit, lines=not console.is_terminal and not console.quiet)
