"""MeanCache's schedule: which steps to compute, and how the velocities between become their mean.

From a computed step t to the next one, s, the mean velocity is taken for ``û = v_t + (σ_s − σ_t) · JVP``. JVP is read
off the latest K velocities, from the step r on: ``JVP = (u − v_r) / Δσ``, u their mean and Δσ the way of sigma. A plain
run tells for every t, s and K by how much û would be off, and the steps to compute are those of the path through the
run on which the sum of these costs, to a power that suppresses peaks, is lowest.

The formula is the paper's (arXiv 2601.19961), by which û moves the latents from t on; its authors' code
(UnicomAI/MeanCache) moves them by v_t in the computed step, and by û from the next on. Here are both. JVP, and K from 1
to 6, are the code's, whose tables of steps, found so for other models, never leave out more than 7 steps in a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

WINDOWS = 6
SPAN = 8
PEAK = 4  # the power of costs; the paper's own was not to be found, and of 1 to 4 this one was best on the demo model

Costs = dict[tuple[int, int], tuple[float, np.ndarray]]


def velocity_weights(falls: np.ndarray, window: int) -> np.ndarray:
    """Weights ``[window]`` of the latest velocities in their continuation.

    Args:
        falls: of sigma, of the steps of the window and of those that the continuation stands for until the next
            computed step, the window's last among these.
        window: how many velocities it is read off.
    """
    own = falls[:window]
    weights = own / own.sum()
    weights[0] -= 1
    weights *= falls[window - 1 :].sum() / own.sum()
    weights[-1] += 1
    return weights


def velocity_costs(trails: Sequence[Sequence[torch.Tensor]], sigmas: Sequence[float], whole: bool) -> Costs:
    """By how much a mean velocity is off where the steps between two computed ones are left out.

    Args:
        trails: the velocities of a plain run, step by step, one sequence a branch.
        sigmas: of the run's steps, and the one behind the last.
        whole: whether it stands for the computed step's velocity too.

    Returns:
        ``{(computed, next computed): (cost, weights)}``: the mean absolute error of the mean velocity, and the weights
        of the window in which it is lowest. A run ends as if the step behind the last were computed.
    """
    steps = len(trails[0])
    falls = np.diff(np.array(sigmas))[:steps]
    flat = [torch.stack([output.flatten().float() for output in trail]) for trail in trails]
    costs: Costs = {}
    for start in range(steps):
        moved = start if whole else start + 1
        edges, errors, candidates = [], [], []
        for end in range(start + 2, min(start + SPAN, steps) + 1):
            for window in range(1, min(WINDOWS, start + 1) + 1):
                first = start + 1 - window
                weights = velocity_weights(falls[first:end], window)
                error = np.zeros(steps)
                error[moved:end] = falls[moved:end]
                error[first : start + 1] -= falls[moved:end].sum() * weights
                edges.append((start, end))
                errors.append(error / falls[start:end].sum())
                candidates.append(weights)
        costs[start, start + 1] = 0.0, np.ones(1)
        if errors:
            mixing = torch.from_numpy(np.array(errors, np.float32))
            off = sum((mixing.to(each.device) @ each).abs().mean(1).cpu() for each in flat) / len(flat)
            for edge, cost, weights in zip(edges, off.tolist(), candidates, strict=True):
                if cost < costs.get(edge, (math.inf,))[0]:
                    costs[edge] = cost, weights
    return costs


def average_velocities(costs: Costs, count: int, whole: bool) -> tuple[list[int], dict[int, np.ndarray]]:
    """The steps to compute, at most ``count`` where so few do, and weights on the latest records at those moved by û.

    The first step after a computed one makes û (and, if it is for the ``whole``, that one too); others repeat it.
    """
    steps = 1 + max(start for start, _ in costs)
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [0])}]
    while len(best) <= count or steps not in best[-1]:
        reached: dict[int, tuple[float, list[int]]] = {}
        for (start, end), (cost, _) in costs.items():
            if start in best[-1]:
                before, path = best[-1][start]
                reached[end] = min(reached.get(end, (math.inf, [])), (before + cost**PEAK, [*path, end]))
        best.append(reached)
    _, path = min(reached[steps] for reached in best if steps in reached)
    weights: dict[int, np.ndarray] = {}
    for start, end in itertools.pairwise(path):
        own = costs[start, end][1]
        if end - start > 1:
            weights |= {start: own} if whole else {}
            weights |= {start + 1: own} | dict.fromkeys(range(start + 2, end), np.ones(1))
    return path[:-1], weights
