"""Autoencoder with FLUX's latent layout (factor 8, 16 channels, no quantisation convolutions) and 1.3M parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from diffusers import AutoencoderKL

from .training import MasterWeights, Pace, trained_weights

LATENT_CHANNELS = 16
KL_WEIGHT = 2e-4
EDGE_WEIGHT = 0.5
SQUARE_WEIGHT = 2.0


def make_autoencoder(channels: tuple[int, ...], groups: int) -> AutoencoderKL:
    """Build an untrained autoencoder with `channels` at factors 1, 2, 4 and 8.

    It has few normalisation groups, because a group's mean is lost in normalisation and flat colour is what matters
    most.
    """
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=groups,
        sample_size=512,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
    )


def train_autoencoder(
    vae: AutoencoderKL, numbers: torch.Tensor, pace: Pace, *, render: Callable, batch: int, size: int
) -> list[torch.Tensor]:
    """Train in place on images rendered on the fly, alternating whole images and windows at twice the scale.

    The loss is L1 and L2 on pixels, L1 on their differences along x and y (edges), and a small KL divergence.

    Args:
        vae: bf16, on the device of `numbers`.
        numbers: packed images [N, K].
        pace: the budget.
        render: renders packed images, like `rendering.render`.
        batch: images per step.
        size: side of the rendered images in pixels.

    Returns:
        The averaged weights in float32, in the order of `trained_weights(vae)`.
    """
    masters = [weight.detach().float() for _, weight in trained_weights(vae)]
    weights = MasterWeights(vae, masters, average_decay=0.998)
    generator = torch.Generator(numbers.device).manual_seed(1)
    for pictures in _draw_batches(numbers, render, batch, size, generator):
        if pace.spent >= 1:
            break
        pixels, squares, edges, divergence = _losses(vae, pictures)
        (pixels + SQUARE_WEIGHT * squares + EDGE_WEIGHT * edges + KL_WEIGHT * divergence).backward()
        weights.step(pace.rate)
        last = {"l1": pixels.detach(), "edges": edges.detach(), "kl": divergence.detach()}
        pace.count(batch, lambda last=last: {name: float(value) for name, value in last.items()}, every=100)
    weights.load_averages()
    return weights.averages


@torch.no_grad()
def latent_statistics(vae: AutoencoderKL, pictures: torch.Tensor) -> dict[str, float]:
    """Compute the shift and scale, named as in the config, that give these latents zero mean and unit variance."""
    latents = vae.encode(pictures).latent_dist.mode().float()
    return {"shift_factor": float(latents.mean()), "scaling_factor": float(1 / latents.std())}


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKL, pictures: torch.Tensor) -> float:
    """Mean PSNR in dB of images [N, 3, H, W] in -1..1 after encoding and decoding."""
    decoded = vae.decode(vae.encode(pictures).latent_dist.mode()).sample.float().clamp(-1, 1)
    error = ((decoded - pictures.float()) / 2).square().mean(dim=(1, 2, 3))
    return float((-10 * torch.log10(error)).mean())


def _draw_batches(
    numbers: torch.Tensor, render: Callable, batch: int, size: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Endless batches of images, bf16 [batch, 3, size, size]; eight batches rendered at once keep the GPU busy."""
    for turn in itertools.count():
        rows = torch.randint(len(numbers), (8 * batch,), device=numbers.device, generator=generator)
        extent = (1.0, 0.5)[turn % 2]
        corner = torch.rand(len(rows), 2, device=numbers.device, generator=generator) * (1 - extent)
        drawn = render(numbers[rows], size, corner=corner, extent=extent).bfloat16()
        yield from drawn.contiguous(memory_format=torch.channels_last).split(batch)


def _losses(vae: AutoencoderKL, pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
    moments = vae.encoder(pictures).float()
    mean, log_variance = moments.chunk(2, dim=1)
    log_variance = log_variance.clamp(-20, 10)
    latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
    difference = vae.decoder(latents.to(pictures.dtype)).float() - pictures.float()
    pixels = difference.abs().mean()
    edges = difference.diff(dim=-1).abs().mean() + difference.diff(dim=-2).abs().mean()
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return pixels, difference.square().mean(), edges, divergence
