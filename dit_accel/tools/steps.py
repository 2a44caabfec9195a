"""Tells each denoising step of a pipeline as it ends, in the place of the bar that the pipeline draws."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tqdm import tqdm


class StepBar(tqdm):
    """The bar that a pipeline advances, which draws nothing and tells how far it is.

    Args:
        tell: gets how many steps are done, and how many there are. What it raises ends the pipeline's call.
    """

    monitor_interval = 0  # needs no thread that looks after it

    def __init__(
        self, tell: Callable[[int, int], None], iterable: Any = None, total: int | None = None, **_: Any
    ) -> None:
        self._tell_steps = tell
        super().__init__(iterable, total=total, file=io.StringIO(), mininterval=0, miniters=1)
        self._tell()

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        pass

    def update(self, n: float | None = 1) -> bool | None:
        drawn = super().update(n)
        self._tell()  # not in display, where what it raises would leave tqdm's lock taken
        return drawn

    def _tell(self) -> None:
        if self.total:
            self._tell_steps(self.n, self.total)


@contextmanager
def watched_steps(pipe: Any, tell: Callable[[int, int], None]) -> Iterator[None]:
    """Within, the pipeline tells its steps; see :class:`StepBar`."""
    pipe.progress_bar = partial(StepBar, tell)
    try:
        yield
    finally:
        del pipe.progress_bar
