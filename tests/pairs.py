"""Cases in which each value of a parameter meets each value of every other one: far fewer than all combinations."""

import itertools
from collections.abc import Callable, Iterable, Mapping

import pytest


def every_pair(
    excluded: Callable[[dict], bool] = lambda case: False, **axes: Mapping[str, object] | Iterable
) -> pytest.MarkDecorator:
    """Parametrize a test over ``axes``, values by their ids or values alone, without cases that are ``excluded``."""
    named = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes.values()]
    cases = [
        ids
        for ids in itertools.product(*named)
        if not excluded({name: axis[one] for name, axis, one in zip(axes, named, ids, strict=True)})
    ]
    chosen = cases if len(axes) < 3 else covering(cases)
    values = [
        pytest.param(*(axis[one] for axis, one in zip(named, ids, strict=True)), id="-".join(map(str, ids)))
        for ids in chosen
    ]
    return pytest.mark.parametrize(tuple(axes), values)


def covering(cases: list[tuple]) -> list[tuple]:
    """Return cases that hold all pairs which occur in ``cases``, each time the one with the most new pairs."""
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
