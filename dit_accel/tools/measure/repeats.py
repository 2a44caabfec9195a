"""Statistics of runs timed alternately: plain, accelerated, plain, …"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

REPEATS = 3  # timed runs, each followed by plain steps
PLAIN_STEPS = 3  # of a plain run for comparison: all its steps do the same work
DISTURBED = 0.25  # relative difference of speed-ups above which other work on the machine disturbed the runs


class Spread(NamedTuple):
    """Median and range of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = sorted(values)
        return cls(statistics.median(values), values[0], values[-1])

    @property
    def width(self) -> float:
        """Relative difference of the largest and the smallest value."""
        return self.most / self.least - 1

    def __str__(self) -> str:
        """Format as ``3.42× (3.31 to 3.50)``, or only the median if the range is within 2%."""
        median = f"{self.median:.2f}×"
        return median if self.width <= 0.02 else f"{median} ({self.least:.2f} to {self.most:.2f})"


def speedup(plain: Sequence[float], fast: Sequence[float]) -> Spread:
    """Speed-up from runs timed alternately: the ratios of neighbouring runs."""
    return Spread.of(one / other for one, other in zip(plain, fast, strict=True))


def speedup_of(row: dict[str, Any]) -> Spread:
    """Speed-up of a comparison's row over the plain steps timed after each run."""
    return speedup(row["plain_seconds_each"], row["seconds_each"])


def disturbed(what: str, width: float) -> str:
    advice = "Stop other programs on this machine, or raise --repeats."
    return f"{what} were disturbed: speed-ups of repeats differ by up to {width:.0%}. {advice}"
