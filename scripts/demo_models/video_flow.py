"""Training of a video transformer and its text encoders by rectified flow, on a bank of latents on the device.

With clean latents x and noise n the model sees `x_s = (1 - s) x + s n` at noise level s in 0..1 and learns the velocity
`n - x`. Levels follow the schedule that the pipeline will walk: a logit-normal whose median is the schedule's, plus
some uniform ones for the ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from .training import MasterWeights, Pace, finite
from .video_family import LATENT_CHANNELS, SHIFT, VideoFamily

PROMPT_DROPOUT = 0.1
UNIFORM_LEVELS = 0.15


@dataclass(frozen=True)
class Bank:
    """What training reads: `latents` bf16 [N, LATENT_CHANNELS, F, H, W], and `text`, int64 [N + 1, length] each.

    Row 0 of the text is the empty prompt; clip i has row i + 1.
    """

    latents: torch.Tensor
    text: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return len(self.latents)


def train_flow(
    family: VideoFamily,
    flow: nn.Module,
    masters: list[torch.Tensor],
    bank: Bank,
    pace: Pace,
    *,
    batch: int,
    seed: int = 0,
    long_text_every: int = 16,
    average_decay: float = 0.999,
) -> list[torch.Tensor]:
    """Train in place; returns the averaged weights in float32, in the order of `trained_weights(flow)`.

    Args:
        family: of `flow`.
        flow: bf16, on the bank's device.
        masters: its trained weights in float32.
        bank: latents and text.
        pace: the budget.
        batch: clips per step.
        seed: of what is drawn; another one when training goes on.
        long_text_every: each so many steps the text has the pipeline's own padded length, if that matters, at a quarter
            of the batch and not compiled.
        average_decay: of the running average of the weights.
    """
    weights = MasterWeights(flow, masters, average_decay=average_decay)
    generator = torch.Generator(bank.latents.device).manual_seed(seed)
    running: dict[str, torch.Tensor] = {}
    while pace.spent < 1:
        long_text = (pace.steps + 1) % long_text_every == 0 and family.lengthen(bank.text) is not None
        count = max(1, batch // 4) if long_text else batch
        with torch.compiler.set_stance("force_eager" if long_text else "default"):
            loss = flow_loss(family, flow, bank, count, generator, long_text=long_text)
            loss.backward()
        weights.step(pace.rate)
        key = "loss long" if long_text else "loss"
        running[key] = torch.lerp(running.get(key, loss.detach()), loss.detach(), 0.05)
        pace.count(count, lambda: finite(running), every=200)
    return weights.averages


def flow_loss(
    family: VideoFamily,
    flow: nn.Module,
    bank: Bank,
    batch: int,
    generator: torch.Generator,
    *,
    long_text: bool = False,
) -> torch.Tensor:
    """Mean squared error of the velocity on `batch` clips of the bank at random noise levels."""
    device = bank.latents.device
    rows = torch.randint(len(bank.latents), (batch,), device=device, generator=generator)
    clean = bank.latents[rows].float()
    noise = torch.randn(clean.shape, device=device, generator=generator)
    levels = draw_levels(batch, generator)
    noisy = torch.lerp(clean, noise, levels.view(-1, 1, 1, 1, 1)).bfloat16()
    dropped = torch.rand(batch, device=device, generator=generator) < PROMPT_DROPOUT
    text_rows = torch.where(dropped, 0, rows + 1)
    text = tuple(values[text_rows] for values in bank.text)
    velocity = flow(noisy, levels, *(family.lengthen(text) if long_text else text))
    return (velocity.float() - (noise - clean)).square().mean()


def draw_levels(count: int, generator: torch.Generator) -> torch.Tensor:
    """Noise levels in 0..1, float32 [count]."""
    device = generator.device
    levels = torch.sigmoid(math.log(SHIFT) + torch.randn(count, device=device, generator=generator))
    uniform = torch.rand(count, device=device, generator=generator)
    chosen = torch.rand(count, device=device, generator=generator) < UNIFORM_LEVELS
    return torch.where(chosen, uniform, levels)


def compile_blocks(flow: nn.Module) -> None:
    """Compile the transformer's repeated blocks, in place. Where that fails they run as they are: slower."""
    torch._dynamo.config.suppress_errors = True
    flow.transformer.compile_repeated_blocks(dynamic=False)


def backward_once(
    family: VideoFamily,
    flow: nn.Module,
    text: tuple[torch.Tensor, ...],
    device: torch.device,
    *,
    frames: int,
    size: int,
    batch: int,
) -> None:
    """Run forward and backward once at the training shape, on latents of zeros."""
    latents = torch.zeros(1, LATENT_CHANNELS, (frames + 3) // 4, size // 8, size // 8, device=device).bfloat16()
    flow_loss(family, flow, Bank(latents, text), batch, torch.Generator(device).manual_seed(0)).backward()
