"""What an error of a step's output does to the result of the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def error_weights(kind: str, sigmas: Sequence[float]) -> Sequence[float]:
    """What an error of every step's output counts.

    Args:
        kind: ``output``: the same at all; ``latents``: how far the step moves the latents, which is its step in sigma
            over the mean of the run.
        sigmas: noise levels, one a step.
    """
    gaps = [abs(after - before) for before, after in pairwise(sigmas)]
    if kind == "output" or not any(gaps):
        return [1.0] * len(sigmas)
    gaps.append(gaps[-1])  # the last step's own end is not among the sigmas
    return [gap * len(sigmas) / sum(gaps) for gap in gaps]
