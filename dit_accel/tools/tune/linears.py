"""Which linear layers bear 8 bits: how wrong each kind gets on the inputs that plain runs give it."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from dit_accel.kernels import quantize_rows, quantized_linear
from dit_accel.models import denoisers
from dit_accel.models.beside.quantized_linears import LEAST_ROWS, roundable
from dit_accel.presets import Linear

EVERY = 9  # calls of a layer from one that is measured to the next; odd, so that both branches have their turn
ROWS = 256  # of a call that are measured, spread evenly
SAVED = 0.5  # share of a layer's work that 8 bits are taken to save


@dataclass(frozen=True)
class Kind:
    """Layers that have their names in common but for the block's number.

    Args:
        pattern: of their names, as ``linear.exclude`` takes it.
        error: relative L2 error ``‖y − ŷ‖ / ‖y‖`` in 8 bits, mean over layers and calls.
        share: of all such layers' multiplications a token.
    """

    pattern: str
    error: float
    share: float


class LinearTap:
    """While it is on, measures plain linear layers in a pipeline's blocks.

    Args:
        pipe: runs plainly.
        section: of the preset, with a dtype.
    """

    def __init__(self, pipe: Any, section: Linear) -> None:
        self._dtype = str(section.dtype)
        self._layers = [each for model in denoisers(pipe).values() for each in roundable(model, section).items()]
        self._errors: dict[str, list[float]] = defaultdict(list)
        self._calls: dict[str, int] = defaultdict(int)

    def __enter__(self) -> LinearTap:
        self._handles = [
            layer.register_forward_hook(partial(self._visit, _pattern(name))) for name, layer in self._layers
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def kinds(self) -> list[Kind]:
        """What was measured, the kinds that err most first."""
        work: dict[str, int] = defaultdict(int)
        for name, layer in self._layers:
            work[_pattern(name)] += layer.weight.numel()
        measured = {pattern: errors for pattern, errors in self._errors.items() if errors}
        whole = sum(work[pattern] for pattern in measured)
        kinds = [Kind(each, statistics.fmean(errors), work[each] / whole) for each, errors in measured.items()]
        return sorted(kinds, key=lambda kind: -kind.error)

    @torch.no_grad()
    def _visit(self, pattern: str, layer: torch.nn.Linear, args: tuple, output: torch.Tensor) -> None:
        x = args[0].flatten(0, -2)
        place = self._calls[pattern]
        self._calls[pattern] += 1
        if place % EVERY or len(x) < LEAST_ROWS:
            return
        x = x[:: max(len(x) // ROWS, 1)]
        exact = functional.linear(x, layer.weight, layer.bias).float()
        rows, weights = (quantize_rows(each, dtype=self._dtype) for each in (x, layer.weight))
        rounded = quantized_linear(*rows, *weights, layer.bias, out_dtype="float32")
        self._errors[pattern].append(((rounded - exact).norm() / exact.norm().clamp(min=1e-12)).item())


def excluded(kinds: Sequence[Kind], bound: float) -> list[str]:
    """Patterns of the kinds that err more than ``bound``."""
    return [kind.pattern for kind in kinds if kind.error > bound]


def work_left(kinds: Sequence[Kind], bound: float) -> float:
    """The share of a step's work that is left with all other kinds in 8 bits, if the work were these layers alone."""
    return 1 - SAVED * sum(kind.share for kind in kinds if kind.error <= bound)


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name, count=1)
