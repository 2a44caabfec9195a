"""Milliseconds of a call: alone after a cleared cache, back to back in a CUDA graph, or called again and again."""

from __future__ import annotations

import functools
import statistics
import timeit
from collections.abc import Callable

import torch

Timer = Callable[[Callable[[], object], str], float]  # (call, device) -> milliseconds

BUDGET_MS = 50.0  # filled with repetitions of a short call
LONG_BUDGET_MS = 600.0  # not exceeded by those of a long call, but for the fewest
FEWEST, FEW, MOST = 3, 7, 50
# Zeroing so much clears the L2 cache and keeps a GPU busy for 0.2 ms and more, so that Python has launched the op
# before its turn comes, as in a step that the GPU bounds. (triton.testing.do_bench zeroes 256 MiB, in 0.06 ms.)
CLEARED_BYTES = 2**30
CALLS_IN_GRAPH = 10
CALLS_IN_A_ROW, ROWS_OF_CALLS = 100, 5


def median_ms(call: Callable[[], object], device: str) -> float:
    """Median milliseconds of ``call`` on a GPU's own clock, every time after the L2 cache was cleared.

    Takes a call that has run before. Runs it once, then 7 to 50 times, or 3 to 7 where one takes 86 ms and more.
    """
    (first,) = _times(call, device, 1)
    few = min(max(LONG_BUDGET_MS / first, FEWEST), FEW)
    return statistics.median(_times(call, device, int(min(max(BUDGET_MS / first, few), MOST))))


def replayed_ms(call: Callable[[], object], device: str) -> float:
    """Milliseconds of ``call`` within a CUDA graph of ten: the work of the GPU, without any launch by Python.

    For chains of small kernels. What they read stays in the cache, as far as it fits.

    Raises:
        RuntimeError: the call can't be captured, because it makes the host wait.
    """
    if device == "cpu":
        return median_ms(call, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_IN_GRAPH):
            call()
    return median_ms(graph.replay, device) / CALLS_IN_GRAPH


def called_ms(call: Callable[[], object], device: str) -> float:
    """Milliseconds of ``call`` in a Python loop that nothing else delays: of a short call, what its launch costs.

    The best of 5 rows of 100.
    """
    if device == "cpu":
        return median_ms(call, device)

    def row() -> None:
        for _ in range(CALLS_IN_A_ROW):
            call()
        torch.cuda.synchronize()

    seconds = timeit.repeat(row, setup=torch.cuda.synchronize, number=1, repeat=ROWS_OF_CALLS)
    return min(seconds) * 1000 / CALLS_IN_A_ROW


def _times(call: Callable[[], object], device: str, repetitions: int) -> list[float]:
    if device == "cpu":
        return [seconds * 1000 for seconds in timeit.repeat(call, number=1, repeat=repetitions)]
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repetitions)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        _cache_filler().zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


@functools.cache
def _cache_filler() -> torch.Tensor:
    return torch.empty(CLEARED_BYTES, dtype=torch.uint8, device="cuda")
