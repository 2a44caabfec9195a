"""Train a video transformer and its text encoders by rectified flow, on a bank of latents on the device.

With clean latents x and noise n the model sees `x_s = (1 - s) x + s n` at noise level s in 0..1 and learns the velocity
`n - x`. Most levels follow the pipeline's schedule: a logit-normal with the schedule's median. The others are uniform,
to cover the ends.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import nn

from .training import MasterWeights, Pace, finite
from .video_family import SHIFT, Shape, VideoFamily

PROMPT_DROPOUT = 0.1
UNIFORM_LEVELS = 0.15


@dataclass(frozen=True)
class Bank:
    """Training data: `latents` by video shape, bf16 [N, LATENT_CHANNELS, F, H, W], fewer for longer videos; and `text`,
    int64 [largest N + 1, length] each.

    Row 0 of the text is the empty prompt; video i of any shape has row i + 1.
    """

    latents: dict[Shape, torch.Tensor]
    text: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return sum(map(len, self.latents.values()))


def train_flow(
    family: VideoFamily,
    flow: nn.Module,
    masters: list[torch.Tensor],
    bank: Bank,
    pace: Pace,
    *,
    batches: dict[Shape, int],
    seed: int = 0,
    long_text_every: int = 15,
    average_decay: float = 0.999,
) -> list[torch.Tensor]:
    """Train in place; return the averaged weights in float32, in the order of `trained_weights(flow)`.

    Args:
        family: the family of `flow`.
        flow: bf16, on the bank's device.
        masters: its trained weights in float32.
        bank: latents and text.
        pace: the budget.
        batches: videos per step, by shape; each step at a longer shape follows three at the first.
        seed: seed of all random numbers; use another one when resuming.
        long_text_every: period in steps at which text has the pipeline's own padded length, if that matters, with a
            quarter of the batch and not compiled.
        average_decay: decay of the running average of the weights.
    """
    weights = MasterWeights(flow, masters, average_decay=average_decay)
    generator = torch.Generator(bank.text[0].device).manual_seed(seed)
    first, *longer = batches
    turns = itertools.cycle([shape for other in longer for shape in (first, first, first, other)] or [first])
    running: dict[str, torch.Tensor] = {}
    while pace.spent < 1:
        shape = next(turns)
        long_text = (pace.steps + 1) % long_text_every == 0 and family.lengthen(bank.text) is not None
        count = max(1, batches[shape] // 4) if long_text else batches[shape]
        with torch.compiler.set_stance("force_eager" if long_text else "default"):
            loss = flow_loss(family, flow, bank, shape, count, generator, long_text=long_text)
            loss.backward()
        weights.step(pace.rate)
        key = f"loss {shape.frames} frames" + (", long text" if long_text else "")
        running[key] = torch.lerp(running.get(key, loss.detach()), loss.detach(), 0.05)
        pace.count(count, lambda: finite(running), every=200)
    return weights.averages


def flow_loss(
    family: VideoFamily,
    flow: nn.Module,
    bank: Bank,
    shape: Shape,
    batch: int,
    generator: torch.Generator,
    *,
    long_text: bool = False,
) -> torch.Tensor:
    """Mean squared error of the velocity on `batch` videos of a shape in the bank, at random noise levels."""
    latents = bank.latents[shape]
    device = latents.device
    rows = torch.randint(len(latents), (batch,), device=device, generator=generator)
    clean = latents[rows].float()
    noise = torch.randn(clean.shape, device=device, generator=generator)
    levels = draw_levels(batch, generator)
    noisy = torch.lerp(clean, noise, levels.view(-1, 1, 1, 1, 1)).bfloat16()
    dropped = torch.rand(batch, device=device, generator=generator) < PROMPT_DROPOUT
    text_rows = torch.where(dropped, 0, rows + 1)
    text = tuple(values[text_rows] for values in bank.text)
    velocity = flow(noisy, levels, *(family.lengthen(text) if long_text else text))
    return (velocity.float() - (noise - clean)).square().mean()


def draw_levels(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random noise levels in 0..1, float32 [count]."""
    device = generator.device
    levels = torch.sigmoid(math.log(SHIFT) + torch.randn(count, device=device, generator=generator))
    uniform = torch.rand(count, device=device, generator=generator)
    chosen = torch.rand(count, device=device, generator=generator) < UNIFORM_LEVELS
    return torch.where(chosen, uniform, levels)


def compile_blocks(flow: nn.Module) -> None:
    """Compile the transformer's repeated blocks, in place. If that fails they run uncompiled, which is slower."""
    torch._dynamo.config.suppress_errors = True
    flow.transformer.compile_repeated_blocks(dynamic=False)
