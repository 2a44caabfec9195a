"""Weights that torchao stores in 8 bits: a value for each value of the weight, and scales."""

import torch

from dit_accel.loop.conditioning import PLAIN_TENSORS


def is_readable(weight: torch.Tensor) -> bool:
    """Return True for a plain tensor, and for one that torchao stores in 8 bits, value by value."""
    scales_input = getattr(weight, "act_pre_scale", None) is not None  # SmoothQuant, AWQ
    is_stored = getattr(getattr(weight, "qdata", None), "shape", None) == weight.shape
    return type(weight) in PLAIN_TENSORS or (is_stored and not scales_input)


def plain_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight if type(weight) in PLAIN_TENSORS else weight.dequantize()


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that torchao stores in place of a tensor, or the tensor itself."""
    return [getattr(tensor, name) for name in getattr(type(tensor), "tensor_data_names", ())] or [tensor]
