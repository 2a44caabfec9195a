"""What both trainings share: bf16 weights with float32 masters and their running average, and a clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn


class MasterWeights:
    """AdamW on float32 copies of a bf16 model's weights, with an exponential moving average.

    The model computes in bf16 throughout, as it will when used; only the update is exact.
    """

    def __init__(
        self, model: nn.Module, masters: list[torch.Tensor], *, weight_decay: float, average_decay: float
    ) -> None:
        """Own `masters`, float32 and in the order of `model.parameters()`; the model holds their bf16 rounding."""
        self.live = list(model.parameters())
        self.masters = masters
        self.averages = [weight.clone() for weight in self.masters]
        self.average_decay = average_decay
        self.steps = 0
        on_gpu = self.masters[0].is_cuda
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1.0, betas=(0.9, 0.99), weight_decay=weight_decay, fused=on_gpu
        )

    @torch.no_grad()
    def step(self, learning_rate: float, largest_norm: float = 1.0) -> None:
        """Apply the gradients that the live weights hold, clipped to `largest_norm`, and clear them."""
        gradients = [weight.grad.float() for weight in self.live]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (largest_norm / (norm + 1e-6)).clamp_max(1.0))
        for master, live, gradient in zip(self.masters, self.live, gradients, strict=True):
            master.grad, live.grad = gradient, None
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        torch._foreach_copy_(self.live, self.masters)
        self.steps += 1
        decay = min(self.average_decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.averages, self.masters, 1 - decay)

    @torch.no_grad()
    def load_averages(self) -> None:
        """Put the averaged weights into the model."""
        torch._foreach_copy_(self.live, self.averages)


class Pace:
    """A wall-clock budget: how far it is spent, the learning rate at that point, and progress lines.

    The rate warms up over `warmup` of the budget and then falls to 2% of `peak` along a cosine.
    """

    def __init__(
        self, name: str, seconds: float, peak: float, *, warmup: float = 0.04, most_steps: int | None = None
    ) -> None:
        self.name, self.seconds, self.peak, self.warmup, self.most_steps = name, seconds, peak, warmup, most_steps
        self.started = time.monotonic()
        self.steps = self.pictures = 0
        self.losses: list[dict[str, float]] = []

    @property
    def spent(self) -> float:
        """Fraction of the budget that is spent, 0..1: of the steps where they are limited, else of the time."""
        if self.most_steps is not None:
            return min(1.0, self.steps / self.most_steps)
        return min(1.0, (time.monotonic() - self.started) / self.seconds)

    @property
    def rate(self) -> float:
        """The learning rate now."""
        if self.spent < self.warmup:
            return self.peak * max(self.spent / self.warmup, 0.01)
        fall = (self.spent - self.warmup) / (1 - self.warmup)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))

    def count(self, pictures: int, losses: Callable[[], dict[str, float]], every: int = 50) -> None:
        """Count one step of `pictures`; each `every` steps print and keep what `losses()` says."""
        self.steps += 1
        self.pictures += pictures
        if self.steps % every and self.steps != 1:
            return
        values = losses()  # waits for the device, so the clock below is honest
        elapsed = time.monotonic() - self.started
        self.losses.append({"step": self.steps, "seconds": round(elapsed, 1), **values})
        shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
        left = max(0.0, self.seconds - elapsed)
        print(
            f"{self.name} {self.steps:5d}  {shown}  {self.pictures / elapsed:6.0f} pictures/s  {left:4.0f} s left",
            flush=True,
        )
