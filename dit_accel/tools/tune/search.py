"""The search over run-level thresholds: as cheap as the target allows, in few evaluations.

The first axis is traded against every other: for each setting of those, the cheapest of its values that still meets the
target is found by galloping from where the search stands and bisecting what that brackets. The others are then moved
one after the other, in the direction that makes the run cheaper, until none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dit_accel.tools.tune.axes import Axis, Setting

LEAST_GAIN = 0.002  # of the computed fraction, for which it is worth to leave the preset's own value


@dataclass(frozen=True)
class Score:
    """What one setting gives."""

    slack: float  # how far it is on the right side of the target, in the target's unit; negative = it misses it
    cost: float  # computed fraction of the blocks' FLOPs

    @property
    def is_close(self) -> bool:
        """Whether it is as close to the plain run as the target asks."""
        return self.slack >= 0

    @property
    def saves(self) -> bool:
        return self.cost < 1

    @property
    def meets(self) -> bool:
        """Whether it is of use: what computes everything would meet any target."""
        return self.is_close and self.saves


@dataclass(frozen=True)
class Found:
    """A setting with what it gives."""

    places: tuple[int, ...]
    score: Score


class Search:
    """One search.

    Args:
        axes: the first is traded against the others.
        evaluate: a setting's score; asked once for each setting.
        evaluations: most settings that are evaluated.
    """

    def __init__(self, axes: Sequence[Axis], evaluate: Callable[[Setting], Score], evaluations: int) -> None:
        self._axes = axes
        self._evaluate = evaluate
        self._left = evaluations
        self._scores: dict[tuple[int, ...], Score] = {}

    def setting(self, places: tuple[int, ...]) -> Setting:
        """The values at these indices of the axes."""
        return {axis.key: axis.values[place] for axis, place in zip(self._axes, places, strict=True)}

    def run(self) -> Found:
        """The cheapest setting found that meets the target; where none does, the one that saves and comes closest."""
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
        return max(
            (Found(places, score) for places, score in self._scores.items()),
            key=lambda found: (found.score.saves, found.score.slack),
        )

    def _begin(self) -> Found | None:
        """The start, with all other axes moved towards their close ends until the first has a place that is close."""
        places = tuple(axis.start for axis in self._axes)
        while True:
            best = self._fit(places, limit=float("inf"))
            others = zip(self._axes[1:], places[1:], strict=True)
            closer = (places[0], *(place // 2 if axis.closest_first else place for axis, place in others))
            if best is not None or closer == places or self._left == 0:
                return best
            places = closer

    def _follow(self, best: Found, number: int, direction: int) -> Found:
        """Moves along one axis as long as that makes the run no dearer; returns the cheapest on the way."""
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
        """The cheapest place on the first axis that is close enough, from ``places`` on; None if none is.

        Args:
            limit: cost that it must stay below; places that are not close enough and reach it end the search, for
                closer ones cost more.
        """
        first, others = places[0], places[1:]
        last = len(self._axes[0].values) - 1
        low, high = -1, last + 1  # the cheapest place known to be close, and the closest known not to be
        stride = 1
        while (score := self._score((first, *others))) is not None:
            if score.is_close:
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
        """The score at these places; None where no evaluation is left."""
        if places not in self._scores:
            if self._left == 0:
                return None
            self._left -= 1
            self._scores[places] = self._evaluate(self.setting(places))
        return self._scores[places]
