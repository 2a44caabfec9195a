"""Weights as they are stored: by torchao in 8 bits, a value for each value of the weight, and scales; and changes."""

from collections.abc import Iterable
from itertools import zip_longest

import torch
from torch import nn

from dit_accel.loop.conditioning import PLAIN_TENSORS, version_of

State = tuple[int, int | None, torch.Tensor]
SAMPLES = 512  # values of a tensor that are compared; merging an adapter changes nearly all values


def is_readable(weight: torch.Tensor) -> bool:
    """Return True for a plain tensor, and for one that torchao stores in 8 bits, value by value."""
    scales_input = getattr(weight, "act_pre_scale", None) is not None  # SmoothQuant, AWQ
    is_stored = getattr(getattr(weight, "qdata", None), "shape", None) == weight.shape
    return type(weight) in PLAIN_TENSORS or (is_stored and not scales_input)


def plain_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight if type(weight) in PLAIN_TENSORS else weight.dequantize()


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that torchao stores in place of a tensor, or the tensor itself."""
    if type(tensor) in PLAIN_TENSORS:
        return [tensor]
    return [getattr(tensor, name) for name in getattr(type(tensor), "tensor_data_names", ())] or [tensor]


@torch.no_grad()
def state_of(layers: Iterable[nn.Linear], *, copied: bool = False) -> list[State]:
    """Return address, version and some values of weights and biases, which a merged LoRA changes without a version.

    The values are views of the weights unless they are copied.
    """
    stored = [item for layer in layers for item in layer._parameters.values() if item is not None]
    parts = [(part, few(part, SAMPLES)) for item in stored for part in parts_of(item)]
    return [(part.data_ptr(), version_of(part), some.clone() if copied else some) for part, some in parts]


def are_same(known: Iterable[State], now: Iterable[State]) -> bool:
    """Return True if states are equal; waits once for each device and dtype."""
    alike: dict[tuple, list] = {}
    for before, after in zip_longest(known, now, fillvalue=()):  # a bias or parts of a weight are new
        if before[:2] != after[:2]:
            return False
        alike.setdefault((before[2].device, before[2].dtype), []).append((before[2], after[2]))
    return all(torch.equal(*map(torch.cat, zip(*pairs, strict=True))) for pairs in alike.values())


def few(weight: torch.Tensor, most: int) -> torch.Tensor:
    """Return up to ``most`` values of a weight, a view of shape [values]; those of 8 bits are uint8."""
    size = weight.numel()
    if not weight.is_contiguous():
        values = weight[(0,) * (weight.ndim - 1)][:most]
    else:  # an odd stride visits all columns
        values = weight.as_strided((min(size, most),), (max(size // most - 1, 0) | 1,))
    return values.view(torch.uint8) if weight.element_size() == 1 else values
