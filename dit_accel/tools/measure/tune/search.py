"""Search for the cheapest run-level thresholds that meet the target, in few evaluations.

For each setting of the other axes, the search finds the cheapest value of the first axis that still meets the target.
It gallops from the current value until the limit is bracketed, then bisects. It moves the other axes one after the
other in the direction that makes the run cheaper, until no move does.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dit_accel.tools.measure.tune.axes import Axis, Setting

LEAST_GAIN = 0.002  # minimum gain in computed fraction for leaving the preset's own value


class Score(NamedTuple):
    slack: float  # margin to the target, in the target's unit; negative = the target is missed
    cost: float  # computed fraction of the blocks' FLOPs

    @property
    def saves(self) -> bool:
        return self.cost < 1

    @property
    def meets(self) -> bool:
        """Return True if it meets the target and saves work; computing everything meets any target."""
        return self.slack >= 0 and self.saves


class Found(NamedTuple):
    """A setting, as indices of the axes' values, with its score."""

    places: tuple[int, ...]
    score: Score


class Search:
    """One search. ``evaluate`` is called once for each setting, and for at most ``evaluations`` settings."""

    def __init__(self, axes: Sequence[Axis], evaluate: Callable[[Setting], Score], evaluations: int) -> None:
        self._axes, self._evaluate, self._left = axes, evaluate, evaluations
        self._scores: dict[tuple[int, ...], Score] = {}

    def setting(self, places: tuple[int, ...]) -> Setting:
        return {axis.key: axis.values[place] for axis, place in zip(self._axes, places, strict=True)}

    def run(self) -> Found:
        """Return the cheapest found setting that meets the target, otherwise the closest one that saves work."""
        best, before = self._begin(), None
        while best is not before:
            before = best
            for number in range(1, len(self._axes)):
                for direction in (1, -1):
                    moved = self._follow(best, number, direction)
                    if moved is not best:
                        best = moved
                        break
        if best is not None and best.score.saves:
            return best
        found = [Found(places, score) for places, score in self._scores.items()]
        return max(found, key=lambda setting: (setting.score.saves, setting.score.slack))

    def _begin(self) -> Found | None:
        """Fit the first axis at the start; move the other axes to closer values until a fit meets the target."""
        places = tuple(axis.start for axis in self._axes)
        while True:
            best = self._fit(places, limit=float("inf"))
            others = zip(self._axes[1:], places[1:], strict=True)
            closer = (places[0], *(place // 2 if axis.closest_first else place for axis, place in others))
            if best is not None or closer == places or self._left == 0:
                return best
            places = closer

    def _follow(self, best: Found, number: int, direction: int) -> Found:
        """Move along one axis while the cost does not rise; return the cheapest setting on the way."""
        here = best
        while 0 <= (place := here.places[number] + direction) < len(self._axes[number].values):
            found = self._fit((*here.places[:number], place, *here.places[number + 1 :]), limit=best.score.cost)
            if found is None or found.score.cost > best.score.cost:
                break
            here = found
            if here.score.cost < best.score.cost - LEAST_GAIN:
                best = here
        return best

    def _fit(self, places: tuple[int, ...], limit: float) -> Found | None:
        """Return the cheapest place on the first axis that meets the target, starting at ``places``; None if none does.

        The search ends at a place that misses the target and costs ``limit``, because closer places cost more.
        """
        first, others, last = places[0], places[1:], len(self._axes[0].values) - 1
        low, high = -1, last + 1  # cheapest place known to meet the target, and closest place known to miss it
        stride = 1
        while (score := self._score((first, *others))) is not None:
            if score.slack >= 0:
                low = first
            else:
                high = first
                if score.cost >= limit:
                    break
            if high - low <= 1:
                break
            if low >= 0 and high <= last:
                first = (low + high) // 2
            else:
                first = min(low + stride, last) if low >= 0 else max(high - stride, 0)
                stride *= 2
        return None if low < 0 else Found((low, *others), self._scores[low, *others])

    def _score(self, places: tuple[int, ...]) -> Score | None:
        if places not in self._scores:
            if self._left == 0:
                return None
            self._left -= 1
            self._scores[places] = self._evaluate(self.setting(places))
        return self._scores[places]
