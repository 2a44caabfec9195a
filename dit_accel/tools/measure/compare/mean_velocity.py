"""MeanCache's schedule: the steps to compute, and the mean velocity between them.

From a computed step t to the next computed step s, the mean velocity is ``û = v_t + (σ_s − σ_t) · JVP``. JVP comes from
the latest K velocities, starting at step r: ``JVP = (u − v_r) / Δσ``; u is their mean and Δσ the change of sigma. A
plain run gives the error of û for every t, s and K. The computed steps are the path through the run with the lowest sum
of errors, raised to a power that suppresses peaks.

The formula is the paper's (arXiv 2601.19961), where û moves the latents from t on. The authors' code
(UnicomAI/MeanCache) moves them by v_t in the computed step, and by û from the next step on. Both are implemented here.
JVP and K from 1 to 6 follow the code; its step tables for other models skip at most 7 steps in a row.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

WINDOWS = 6
SPAN = 8
PEAK = 4  # power of the costs; the paper gives no value, and of 1 to 4 this was best on the demo model

Costs = dict[tuple[int, int], tuple[float, np.ndarray]]


def velocity_weights(falls: np.ndarray, window: int) -> np.ndarray:
    """Return weights ``[window]`` of the latest velocities in the mean velocity.

    ``falls`` are the changes of sigma in the window's steps, and from its last step to the next computed step.
    """
    inside = falls[:window]
    weights = inside / inside.sum()
    weights[0] -= 1
    weights *= falls[window - 1 :].sum() / inside.sum()
    weights[-1] += 1
    return weights


def velocity_costs(trails: Sequence[Sequence[torch.Tensor]], sigmas: Sequence[float], whole: bool) -> Costs:
    """Compute the mean absolute error of the mean velocity for each pair of computed steps with skipped steps between.

    ``trails`` are the velocities of a plain run by step, one sequence per branch. Returns
    ``{(computed, next computed): (cost, weights)}`` with the weights of the best window; the end of the run counts as a
    computed step. With ``whole``, the mean velocity also replaces the computed step's velocity.
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
            off = sum((mixing.to(trail.device) @ trail).abs().mean(1).cpu() for trail in flat) / len(flat)
            for edge, cost, weights in zip(edges, off.tolist(), candidates, strict=True):
                if cost < costs.get(edge, (math.inf,))[0]:
                    costs[edge] = cost, weights
    return costs


def average_velocities(costs: Costs, count: int, whole: bool) -> tuple[list[int], dict[int, np.ndarray]]:
    """Return the steps to compute (at most ``count``, if possible), and weights on the latest records by skipped step.

    The first step after a computed one calculates û (with ``whole``, the computed step does too); others repeat it.
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
        if end - start > 1:
            shares = costs[start, end][1]
            weights |= {start: shares} if whole else {}
            weights |= {start + 1: shares} | dict.fromkeys(range(start + 2, end), np.ones(1))
    return path[:-1], weights
