"""Errors of linear layers in 8 bits, measured on inputs of plain runs."""

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from dit_accel.kernels import quantize_rows, quantized_linear
from dit_accel.models import denoisers
from dit_accel.models.beside.quantized_linears import LEAST_ROWS, dtype_for, roundable
from dit_accel.models.stored_weights import plain_weight
from dit_accel.presets import Linear
from dit_accel.tools.measure.timing import removed_after

EVERY = 9  # every N-th call of a layer is measured; odd, so that both branches are included
ROWS = 256  # measured rows of a call, evenly spaced
SAVED = 0.5  # assumed share of a layer's work that 8 bits save


@dataclass(frozen=True)
class Kind:
    """Layers with equal names except for the block's number."""

    pattern: str  # of their names, for linear.exclude
    error: float  # relative L2 error ‖y − ŷ‖ / ‖y‖ in 8 bits, mean over layers and calls
    share: float  # of all measured layers' multiplications per token


class LinearTap:
    """Measures the linear layers in a plain pipeline's blocks in the dtype of section ``linear``."""

    def __init__(self, pipe: Any, section: Linear) -> None:
        self._layers = [layer for model in denoisers(pipe).values() for layer in roundable(model, section).items()]
        self._dtype = dtype_for(section, pipe._execution_device)
        self._errors: dict[str, list[float]] = defaultdict(list)
        self._calls: dict[str, int] = defaultdict(int)

    def measuring(self) -> AbstractContextManager[None]:
        """Return a context whose calls of the pipeline are measured."""
        visits = ((layer, partial(self._visit, _pattern(name))) for name, layer in self._layers)
        return removed_after([layer.register_forward_hook(visit) for layer, visit in visits])

    def kinds(self) -> list[Kind]:
        work: dict[str, int] = defaultdict(int)
        for name, layer in self._layers:
            work[_pattern(name)] += layer.weight.numel()
        measured = {pattern: errors for pattern, errors in self._errors.items() if errors}
        whole = sum(work[pattern] for pattern in measured)
        kinds = [Kind(name, statistics.fmean(errors), work[name] / whole) for name, errors in measured.items()]
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
        rows, weights = (quantize_rows(matrix, dtype=self._dtype) for matrix in (x, plain_weight(layer.weight)))
        rounded = quantized_linear(*rows, *weights, layer.bias, out_dtype="float32")
        self._errors[pattern].append(((rounded - exact).norm() / exact.norm().clamp(min=1e-12)).item())


def excluded(kinds: Sequence[Kind], bound: float) -> list[str]:
    return [kind.pattern for kind in kinds if kind.error > bound]


def work_left(kinds: Sequence[Kind], bound: float) -> float:
    """Return the remaining share of a step's work with all other kinds in 8 bits, counting only these layers."""
    return 1 - SAVED * sum(kind.share for kind in kinds if kind.error <= bound)


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name, count=1)
