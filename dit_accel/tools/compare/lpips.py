"""LPIPS where the ``lpips`` package and its network's weights are on this machine; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

BACKBONE = "alexnet-owt-7be5be79.pth"  # torchvision's, which lpips builds on


def lpips_distance(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], float] | str:
    """Mean LPIPS (AlexNet) of two clips' frames, float ``[frames, 3, height, width]`` in 0..1; or why there is none."""
    if find_spec("lpips") is None:
        return "the package lpips is not installed"
    weights = Path(torch.hub.get_dir(), "checkpoints", BACKBONE)
    if not weights.is_file():
        return f"AlexNet's weights are not in {weights.parent}"
    import lpips

    network = lpips.LPIPS(net="alex", verbose=False).to(device)

    @torch.no_grad()
    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return network(a.to(device), b.to(device), normalize=True).mean().item()

    return distance
