"""Train and measure a causal video autoencoder, on videos rendered on the fly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from .autoencoder import EDGE_WEIGHT, KL_WEIGHT
from .clips import render_clips
from .training import MasterWeights, Pace, finite
from .video_family import VideoFamily

SQUARE_WEIGHT = 10.0  # most of the error is at edges that move, in one pixel of a hundred


def train_autoencoder(
    family: VideoFamily,
    vae: nn.Module,
    masters: list[torch.Tensor],
    numbers: torch.Tensor,
    pace: Pace,
    *,
    batches: dict[int, int],
    frames: int,
) -> list[torch.Tensor]:
    """Train in place and leave the averaged weights in the autoencoder.

    The loss is L1 and L2 on pixels, L1 on their differences along x, y and time, and a small KL divergence.

    Args:
        family: the family of `vae`.
        vae: bf16, on the device of `numbers`.
        masters: its trained weights in float32, in the order of `trained_weights(vae)`.
        numbers: packed videos [N, K].
        pace: the budget.
        batches: videos per step, by pixels along a side; each size gets an equal part of the budget, small ones first,
            whose steps are faster.
        frames: frames of each video.

    Returns:
        The averaged weights in float32, in the same order.
    """
    weights = MasterWeights(vae, masters, average_decay=0.998)
    generator = torch.Generator(numbers.device).manual_seed(1)
    sizes = sorted(batches)
    drawn = {
        size: _draw_batches(numbers, batches[size], frames, size, sizes[-1], vae.dtype, generator) for size in sizes
    }
    with family.quick_training(vae):
        losses = {size: _captured(Losses(family, vae), next(drawn[size])) for size in sizes}
        while pace.spent < 1:
            size = sizes[min(int(pace.spent * len(sizes)), len(sizes) - 1)]
            pixels, squares, edges, divergence = losses[size](next(drawn[size]))
            (pixels + SQUARE_WEIGHT * squares + EDGE_WEIGHT * edges + KL_WEIGHT * divergence).backward()
            weights.step(pace.rate)
            last = {"l1": pixels.detach(), "edges": edges.detach(), "kl": divergence.detach()}
            pace.count(batches[size], lambda last=last: finite(last), every=100)
    weights.load_averages()
    return weights.averages


@torch.no_grad()
def latent_statistics(family: VideoFamily, vae: nn.Module, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of these videos' latents, each float32 [C]."""
    latents = torch.cat([family.encode(vae, part).float().chunk(2, dim=1)[0] for part in clips.split(4)])
    return latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))


@torch.no_grad()
def reconstruct(vae: nn.Module, clips: torch.Tensor) -> torch.Tensor:
    """Encode and decode videos [N, 3, F, H, W] in -1..1 as the pipeline does: float32, also in -1..1."""
    parts = [vae.decode(vae.encode(part).latent_dist.mode()).sample for part in clips.to(vae.dtype).split(4)]
    return torch.cat(parts).float().clamp(-1, 1)


def mean_psnr(clips: torch.Tensor, others: torch.Tensor) -> float:
    """Mean PSNR in dB over videos in -1..1."""
    error = ((clips - others) / 2).square().mean(dim=(1, 2, 3, 4))
    return round(float((-10 * torch.log10(error)).mean()), 2)


@torch.no_grad()
def encode_clips(
    family: VideoFamily, vae: nn.Module, numbers: torch.Tensor, pace: Pace, *, frames: int, size: int, batch: int
) -> torch.Tensor:
    """Render videos [N, K] and encode them to normalised bf16 latents, as many as the budget allows."""
    latents = []
    with family.quick_training(vae):
        for part in numbers.split(batch):
            if pace.spent >= 1:
                break
            clips = render_clips(part, frames=frames, size=size).to(vae.dtype)
            moments = family.encode(vae, clips).float()
            latents.append(family.normalise(vae, moments.chunk(2, dim=1)[0]).bfloat16())
            pace.count(len(part), lambda: {"deviation": float(latents[-1].float().std())}, every=100)
    return torch.cat(latents)


def _draw_batches(
    numbers: torch.Tensor,
    batch: int,
    frames: int,
    size: int,
    whole: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Iterator[torch.Tensor]:
    """Endless windows [batch, 3, frames, size, size] of videos of `whole` pixels a side and of half that."""
    for turn in itertools.count():
        rows = torch.randint(len(numbers), (8 * batch,), device=numbers.device, generator=generator)
        extent = min(1.0, (1, 2)[turn % 2] * size / whole)
        corner = torch.rand(len(rows), 2, device=numbers.device, generator=generator) * (1 - extent)
        clips = render_clips(numbers[rows], frames=frames, size=size, corner=corner, extent=extent)
        yield from clips.to(dtype).split(batch)


class Losses(nn.Module):
    """Terms of the loss: absolute and squared error of pixels, absolute error of their differences, KL divergence."""

    def __init__(self, family: VideoFamily, vae: nn.Module) -> None:
        super().__init__()
        self.family, self.vae = family, vae

    def forward(self, clips: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the losses of videos [N, 3, F, H, W] in -1..1, in the autoencoder's dtype."""
        mean, log_variance = self.family.encode(self.vae, clips).float().chunk(2, dim=1)
        log_variance = log_variance.clamp(-20, 10)
        latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        difference = self.family.decode(self.vae, latents.to(clips.dtype)).float() - clips.float()
        pixels = difference.abs().mean()
        edges = sum(difference.diff(dim=axis).abs().mean() for axis in (-1, -2, -3))
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return pixels, difference.square().mean(), edges, divergence


def _captured(losses: Losses, clips: torch.Tensor) -> nn.Module:
    """Capture the losses as CUDA graphs for videos of this shape on a GPU: training is launch-bound."""
    if not clips.is_cuda:
        return losses
    return torch.cuda.make_graphed_callables(losses, (clips,), allow_unused_input=True)
