"""Train and measure an autoencoder, on images or videos rendered on the fly."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from .training import MasterWeights, Pace, finite

KL_WEIGHT = 2e-4
EDGE_WEIGHT = 0.5

Stage = tuple[nn.Module, Iterator[torch.Tensor]]  # `Losses`, captured or not, and its batches


def train_autoencoder(
    vae: nn.Module, masters: list[torch.Tensor], pace: Pace, stages: Sequence[Stage], square_weight: float
) -> list[torch.Tensor]:
    """Train in place, an equal part of the budget in each stage, and leave the averaged weights in the autoencoder.

    Returns them too: like `masters` float32, in the order of `trained_weights(vae)`.
    """
    weights = MasterWeights(vae, masters, average_decay=0.998)
    while pace.spent < 1:
        losses, drawn = stages[min(int(pace.spent * len(stages)), len(stages) - 1)]
        batch = next(drawn)
        pixels, squares, edges, divergence = losses(batch)
        (pixels + square_weight * squares + EDGE_WEIGHT * edges + KL_WEIGHT * divergence).backward()
        weights.step(pace.rate)
        last = {"l1": pixels.detach(), "edges": edges.detach(), "kl": divergence.detach()}
        pace.count(len(batch), lambda last=last: finite(last), every=100)
    weights.load_averages()
    return weights.averages


def windows(
    render: Callable, numbers: torch.Tensor, batch: int, extents: Sequence[float], generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Endless batches of windows, whose widths alternate; eight batches rendered at once keep the GPU busy."""
    for extent in itertools.cycle(extents):
        rows = torch.randint(len(numbers), (8 * batch,), device=numbers.device, generator=generator)
        corner = torch.rand(len(rows), 2, device=numbers.device, generator=generator) * (1 - extent)
        yield from render(numbers[rows], corner=corner, extent=extent).split(batch)


class Losses(nn.Module):
    """Terms of the loss: absolute and squared error of pixels, absolute error of their differences along the last
    `axes` axes, KL divergence.
    """

    def __init__(self, vae: nn.Module, encode: Callable, decode: Callable, axes: int) -> None:
        super().__init__()
        self.vae, self.encode, self.decode, self.axes = vae, encode, decode, axes

    def forward(self, scenes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the losses of images or videos in -1..1, in the autoencoder's dtype."""
        mean, log_variance = self.encode(scenes).float().chunk(2, dim=1)
        log_variance = log_variance.clamp(-20, 10)
        latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        difference = self.decode(latents.to(scenes.dtype)).float() - scenes.float()
        pixels = difference.abs().mean()
        edges = sum(difference.diff(dim=-1 - axis).abs().mean() for axis in range(self.axes))
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return pixels, difference.square().mean(), edges, divergence


@torch.no_grad()
def reconstruct(vae: nn.Module, scenes: torch.Tensor) -> torch.Tensor:
    """Encode and decode images or videos in -1..1 as the pipeline does: float32, also in -1..1."""
    parts = [vae.decode(vae.encode(part).latent_dist.mode()).sample for part in scenes.to(vae.dtype).split(4)]
    return torch.cat(parts).float().clamp(-1, 1)


def mean_psnr(scenes: torch.Tensor, others: torch.Tensor) -> float:
    """Mean PSNR in dB of images or videos in -1..1."""
    error = ((others - scenes.float()) / 2).square().mean(dim=tuple(range(1, scenes.ndim)))
    return round(float((-10 * torch.log10(error)).mean()), 2)
