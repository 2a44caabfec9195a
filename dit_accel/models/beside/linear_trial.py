"""Time computed calls with 8-bit layers and with unchanged layers, and keep the faster.

Layers in 8 bits take more launches, because the input is rounded first, and are slower where no CUDA graph hides that:
a step of Qwen-Image, which has 840 of them, takes 0.15 s instead of 0.13 on one H200.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from dit_accel.loop.report import RunReport
from dit_accel.loop.timing import Stopwatch, stopwatch_on

SLOWER = 1.05  # ratio of times above which layers stay unchanged; timings of equal steps differ by less
TIMED = ("cuda",)  # types of devices on which calls are timed
IN_8_BITS = 3  # timed calls; the first loads kernels, and the third replays a graph if one can be captured
UNCHANGED = 2  # timed calls; the first loads kernels


class LinearTrial:
    """Decide for each kind of call whether its layers run in 8 bits.

    Three calls of a kind run in 8 bits, then two unchanged, all timed. Calls on a CPU or in a graph stay in 8 bits.
    """

    def __init__(self, stopwatch: Callable[[torch.device], Stopwatch] = stopwatch_on) -> None:
        self._stopwatch = stopwatch
        self._seconds: dict[Hashable, list[float]] = {}  # of the calls of a kind, in their order
        # by kind, once it is decided: seconds of a call in 8 bits and of one without, if 8 bits are slower
        self.slower: dict[Hashable, tuple[float, float] | None] = {}

    def is_timing(self, kind: Hashable) -> bool:
        """Return True if the next call of this kind is timed with unchanged layers."""
        return kind not in self.slower and len(self._seconds.get(kind, ())) >= IN_8_BITS

    def run(self, kind: Hashable, device: torch.device, report: RunReport, compute: Callable[[], Any]) -> Any:
        if kind in self.slower or device.type not in TIMED:
            return compute()
        replayed, stop = report.replayed, self._stopwatch(device)
        output = compute()
        seconds = self._seconds.setdefault(kind, [])
        seconds.append(stop()())
        if report.replayed != replayed:
            self.slower[kind] = None
        elif len(seconds) > IN_8_BITS:
            pair = seconds[IN_8_BITS - 1], seconds[-1]
            is_slower = pair[0] > SLOWER * pair[1]
            if is_slower or len(seconds) == IN_8_BITS + UNCHANGED:
                self.slower[kind] = pair if is_slower else None
        return output
