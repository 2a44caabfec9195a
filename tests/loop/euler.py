from collections.abc import Sequence
from itertools import pairwise


def euler_moves(sigmas: Sequence[float]) -> list[list[float]]:
    """Moves of Euler's steps between these noise levels, which are before each step and after the last."""
    changes = [after - before for before, after in pairwise(sigmas)]
    return [changes[:step] + [0.0] * (len(changes) - step) for step in range(len(sigmas))]
