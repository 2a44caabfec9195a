"""Report each denoising step of a pipeline to a callback, instead of showing its progress bar."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tqdm import tqdm


class StepBar(tqdm):
    """Invisible progress bar that reports the numbers of finished and of all steps; an exception ends the call."""

    monitor_interval = 0  # no monitor thread

    def __init__(self, report: Callable[[int, int], None], iterable: Any = None, total: Any = None, **_: Any) -> None:
        self._report = report
        super().__init__(iterable, total=total, file=io.StringIO(), mininterval=0, miniters=1)
        self.update(0)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        pass

    def update(self, n: float | None = 1) -> bool | None:
        drawn = super().update(n)
        if self.total:
            self._report(self.n, self.total)  # not in display, where an exception would leave tqdm's lock held
        return drawn


@contextmanager
def watched_steps(pipe: Any, report: Callable[[int, int], None], chunks: int = 1) -> Iterator[None]:
    """Within the block, a call reports its steps, those of all ``chunks``, to ``report``; see :class:`StepBar`."""
    places = count()

    def bar(*args: Any, **options: Any) -> StepBar:
        before = next(places)
        whole = max(chunks, before + 1)
        return StepBar(lambda done, steps: report(before * steps + done, whole * steps), *args, **options)

    pipe.progress_bar = bar
    try:
        yield
    finally:
        del pipe.progress_bar
