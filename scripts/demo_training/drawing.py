"""Generate the training scenes of a demo model in several processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

CHUNK = 2000  # scenes per random generator


def draw_bank(
    draw: Callable[[random.Random], Any],
    pack: Callable[[Sequence[Any]], torch.Tensor],
    count: int,
    seed: int,
    *,
    parallel: bool,
) -> tuple[list[str], torch.Tensor]:
    """Prompts and packed numbers of `count` training scenes; the same with one process or several.

    `draw` returns an object with a `.prompt`, and `pack` turns a list of them into numbers [N, K].
    """
    jobs = [(min(CHUNK, count - start), f"{seed} {start}") for start in range(0, count, CHUNK)]
    draw_chunk = partial(_draw_chunk, draw, pack)
    if parallel:
        with ProcessPoolExecutor(8, mp_context=get_context("fork")) as pool:
            parts = list(pool.map(draw_chunk, jobs))
    else:
        parts = [draw_chunk(job) for job in jobs]
    return [prompt for prompts, _ in parts for prompt in prompts], torch.cat([torch.tensor(rows) for _, rows in parts])


def _draw_chunk(
    draw: Callable[[random.Random], Any], pack: Callable[[Sequence[Any]], torch.Tensor], job: tuple[int, str]
) -> tuple[list[str], list[list[float]]]:
    count, seed = job
    rng = random.Random(seed)
    scenes = [draw(rng) for _ in range(count)]
    return [scene.prompt for scene in scenes], pack(scenes).tolist()
