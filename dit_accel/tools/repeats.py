"""Runs that are timed in turn, plain, accelerated, plain, …: what several times of one run say."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

REPEATS = 3  # how often a run is timed, beside plain steps each time
PLAIN_STEPS = 3  # of a plain run that is timed beside another: every call of it does the same work
DISTURBED = 0.25  # speed-ups of repeats that differ by more were not of runs alone on the machine


class Spread(NamedTuple):
    """Repeats of one figure."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = sorted(values)
        return cls(statistics.median(values), values[0], values[-1])

    @property
    def width(self) -> float:
        """How much more the most is than the least, as a share of the least."""
        return self.most / self.least - 1

    def __str__(self) -> str:
        """``3.42× (3.31 to 3.50)``, or the median alone where the repeats are within 2%."""
        median = f"{self.median:.2f}×"
        return median if self.width <= 0.02 else f"{median} ({self.least:.2f} to {self.most:.2f})"


def speedup(plain: Sequence[float], fast: Sequence[float]) -> Spread:
    """Of runs that were timed in turn: the ratios of neighbours."""
    return Spread.of(one / other for one, other in zip(plain, fast, strict=True))


def disturbed(what: str, width: float) -> str:
    """The remark on times that were, and what helps."""
    return (
        f"{what} were disturbed: speed-ups of repeats differ by up to {width:.0%}. Close what else runs on this "
        "machine, or raise --repeats."
    )
