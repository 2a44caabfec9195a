"""Time a call in ms: alone after clearing the cache, or back to back in a CUDA graph."""

import functools
import statistics
import timeit
from collections.abc import Callable

import torch

Timer = Callable[[Callable[[], object], str], float]  # (call, device) -> milliseconds

BUDGET_MS = 50.0  # total time of the repetitions of a short call
LONG_BUDGET_MS = 600.0  # limit for a long call, except for the minimum number of repetitions
FEWEST, FEW, MOST = 3, 7, 50
# Zeroing this buffer clears the L2 cache and keeps the GPU busy for at least 0.2 ms. Python launches the op meanwhile,
# as in a GPU-bound step. (triton.testing.do_bench zeroes 256 MiB, in 0.06 ms.)
CLEARED_BYTES = 2**30
CALLS_IN_GRAPH = 10


def median_ms(call: Callable[[], object], device: str) -> float:
    """Median GPU time of ``call`` in ms; the L2 cache is cleared before each repetition.

    ``call`` must have run before. It runs once more, then 7 to 50 times, or 3 to 7 times if it takes 86 ms or longer.
    """
    (first,) = _times(call, device, 1)
    few = min(max(LONG_BUDGET_MS / first, FEWEST), FEW)
    return statistics.median(_times(call, device, int(min(max(BUDGET_MS / first, few), MOST))))


def replayed_ms(call: Callable[[], object], device: str) -> float:
    """GPU time of `call` in ms within a CUDA graph of ten calls, without launches by Python.

    Meant for chains of small kernels. Their inputs stay in the cache if they fit.
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
