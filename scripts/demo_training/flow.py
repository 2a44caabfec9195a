"""Train a transformer and its text encoders by rectified flow, on a bank of latents that stays on the device.

With clean latents x and noise n the model sees `x_s = (1 - s) x + s n` at noise level s in 0..1 and learns the velocity
`n - x`. Most levels follow the pipeline's schedule: a logit-normal with the schedule's median. The others are uniform,
to cover the ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .family import Family, Texts
from .training import MasterWeights, Pace, finite

PROMPT_DROPOUT = 0.1
UNIFORM_LEVELS = 0.15

Turn = tuple[Any, int, bool, str]  # shape of a step's scenes, their number, whether text is lengthened, name in the log


@dataclass(frozen=True)
class Bank:
    """Training data: bf16 `latents` [N, ...] by shape of the scenes, and the `text` of the largest N + 1 rows.

    Row 0 of the text is the empty prompt; scene i of any shape has row i + 1.
    """

    latents: dict[Any, torch.Tensor]
    text: Texts


def train_flow(
    family: Family,
    flow: nn.Module,
    masters: list[torch.Tensor],
    bank: Bank,
    pace: Pace,
    turns: Iterator[Turn],
    seed: int,
) -> list[torch.Tensor]:
    """Train a bf16 model in place; return the averaged weights, like `masters` float32 in `trained_weights`' order.

    Steps with lengthened text run uncompiled.
    """
    weights = MasterWeights(flow, masters, average_decay=0.999)
    generator = torch.Generator(masters[0].device).manual_seed(seed)
    running: dict[str, torch.Tensor] = {}
    for shape, batch, long_text, name in turns:
        if pace.spent >= 1:
            break
        with torch.compiler.set_stance("force_eager" if long_text else "default"):
            loss = flow_loss(family, flow, bank, shape, batch, generator, long_text=long_text)
            loss.backward()
        weights.step(pace.rate)
        running[name] = torch.lerp(running.get(name, loss.detach()), loss.detach(), 0.05)
        pace.count(batch, lambda: finite(running), every=200)
    return weights.averages


def flow_loss(
    family: Family,
    flow: nn.Module,
    bank: Bank,
    shape: Any,
    batch: int,
    generator: torch.Generator,
    *,
    long_text: bool = False,
) -> torch.Tensor:
    """Mean squared error of the velocity on `batch` scenes of a shape in the bank, at random noise levels."""
    latents = bank.latents[shape]
    device = latents.device
    rows = torch.randint(len(latents), (batch,), device=device, generator=generator)
    clean = latents[rows].float()
    noise = torch.randn(clean.shape, device=device, generator=generator)
    levels = draw_levels(batch, family.mean_level(clean), generator)
    noisy = torch.lerp(clean, noise, levels.view(-1, *[1] * (clean.ndim - 1))).bfloat16()
    text_rows = torch.where(torch.rand(batch, device=device, generator=generator) < PROMPT_DROPOUT, 0, rows + 1)
    text = tuple(values[text_rows] for values in bank.text)
    velocity = flow(noisy, levels, *(family.lengthen(text) if long_text else text))
    return (velocity.float() - (noise - clean)).square().mean()


def draw_levels(count: int, mean: float, generator: torch.Generator) -> torch.Tensor:
    """Random noise levels in 0..1, float32 [count]; `mean` is that of their log-odds."""
    device = generator.device
    levels = torch.sigmoid(mean + torch.randn(count, device=device, generator=generator))
    uniform = torch.rand(count, device=device, generator=generator)
    chosen = torch.rand(count, device=device, generator=generator) < UNIFORM_LEVELS
    return torch.where(chosen, uniform, levels)
