"""A comparison of results whose sums may round differently.

A pipeline gives equal bits whenever it runs on the same weights in memory, with as many threads, in one process: there
tests compare with `torch.equal`. Matrix kernels choose the order of a sum by the weights' address (those of a file lie
at any), the threads and the processor, so results of other allocations, processes and threads agree up to rounding.
Their decisions agree too, unless an error lies within rounding of its threshold; the errors of these tests do not.
"""

import numpy as np
import torch

RELATIVE = 1e-5  # of float32 latents: some 100 roundings of 6e-8 that do not cancel; a lost step or layer is over 1e-3
LEVELS = 1  # of 255, where a value lies on the border between two


def equal_up_to_rounding(found: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray) -> bool:
    """Return True if latents, or pixels of 8 bits, have one shape and differ by rounding only."""
    if found.shape != expected.shape:
        return False
    if isinstance(found, np.ndarray):
        return bool((np.abs(found.astype(int) - expected.astype(int)) <= LEVELS).all())
    return bool((found - expected).norm() <= RELATIVE * expected.norm())


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance of two tensors."""
    return float((found - expected).norm() / expected.norm())
