"""Outputs of a transformer that have schedules of their own, such as MiniMax-H3's video and audio."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import torch

from dit_accel.loop.closed_loop import ClosedLoop, Output
from dit_accel.loop.tracker import StepMode

FIRST = "first output"


class LoopPerOutput:
    """One loop for each output with a schedule of its own, used like a single :class:`ClosedLoop`.

    Each output is forecast, corrected and judged by its own schedule. The loops share a gap, so the output whose
    forecasts reach least far decides when all compute.

    Args:
        loops: loops by name of the output, in the order of the outputs; further outputs follow the first loop.

    Attributes:
        decider: name of the output that decided the next computed step; None = none has decided yet.
    """

    def __init__(self, loops: dict[str, ClosedLoop]) -> None:
        self._names = list(loops)
        self._loops = list(loops.values())
        self._used = 1  # loops whose output the transformer returned
        self.gap, self.rows = self._loops[0].gap, self._loops[0].rows
        self.decider: str | None = None

    @property
    def order(self) -> float:
        """Degree of the first output's forecasts."""
        return self._loops[0].order

    @property
    def measured(self) -> Sequence[torch.Tensor]:
        """Errors measured at the newest outputs, on the device."""
        return list(chain.from_iterable(loop.measured for loop in self._loops))

    @property
    def computed_step(self) -> int:
        """Latest computed step of this branch."""
        return self._loops[0].computed_step

    @computed_step.setter
    def computed_step(self, step: int) -> None:
        for loop in self._loops:
            loop.computed_step = step

    def mode(self, step: int, blocks_ready: bool = True) -> StepMode:
        """Return the step's mode; a branch that can't forecast yet computes."""
        return self._loops[0].mode(step, blocks_ready)

    def forecast(self, step: int) -> Output:
        """Return the forecast outputs of a step, in new tensors."""
        return _in_order([loop.forecast(step) for loop in self._loops[: self._used]])

    def observe(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        """Pass each output of a computed step to its loop, and return the corrected outputs."""
        count = len(self._loops)
        parts = [(*output[:1], *output[count:]), *((tensor,) for tensor in output[1:count])]
        self._used = len(parts)
        return _in_order([loop.observe(step, part, used) for loop, part in zip(self._loops, parts, strict=False)])

    def decide(self, step: int, measured: Sequence[float]) -> float | None:
        """Set the degrees of forecasts and the next computed step.

        Returns:
            The largest error of an output; None = no forecast was possible.
        """
        numbers, loops = iter(measured), self._loops[: self._used]
        errors = [loop.decide(step, list(islice(numbers, len(loop.measured)))) for loop in loops]
        known = [error for error in errors if error is not None]
        if len(known) == len(loops):
            reached = [(loop.following, -error) for loop, error in zip(loops, known, strict=True)]
            self.decider = self._names[reached.index(min(reached))]
        return max(known, default=None)

    def restart(self) -> None:
        """Drop the records and the list of forecast steps."""
        for loop in self._loops:
            loop.restart()

    def adopt(self, order: int) -> None:
        """Change the highest degree of forecasts."""
        for loop in self._loops:
            loop.adopt(order)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors on the device."""
        for loop in self._loops:
            yield from loop.tensors()


def _in_order(parts: Sequence[Output]) -> Output:
    """Return all outputs from the loops' outputs: the first loop has the first output and those without a schedule."""
    first, *others = parts
    return (first[0], *chain.from_iterable(others), *first[1:])
