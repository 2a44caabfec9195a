"""Parts of all trainings: scenes, bf16 weights with float32 masters and their running average, and a time budget."""

import copy
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn

MATRIX_RATE = 2.0  # of orthogonalised steps, times the rate of AdamW
WARMUP = 0.04  # of a budget
CHUNK = 2000  # scenes per random generator


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a demo's trainings; `steps`, if set, limits each of them instead of the clock.

    `vae_batches`: scenes per step by pixels a side; `batches`: the transformer's by shape; `bank_seconds`: encoding
    time of videos of each shape; `bank_tokens`: their latent positions at a time.
    """

    scenes: int
    vae_seconds: float
    vae_rate: float
    vae_batches: dict[int, int]
    batches: dict[Any, int]
    finish_seconds: float
    prompts: int
    bank_seconds: float = 0.0
    bank_tokens: int = 0
    sample_steps: int = 50
    flow_rate: float = 1e-3
    steps: int | None = None


class MasterWeights:
    """Updates a bf16 model through float32 copies of its weights, and keeps their exponential moving average.

    The model always computes in bf16, as in use; only the update is exact. Matrices and convolutions inside blocks take
    orthogonalised momentum steps (Muon, Jordan et al. 2024), scaled to an entry size of 0.2 times the rate; all other
    weights use AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: list[torch.Tensor],
        *,
        average_decay: float,
        rates: dict[str, float] | None = None,
    ) -> None:
        """Store `masters`, float32 and in the order of `trained_weights(model)`; the model holds their bf16 rounding.

        `rates` multiplies the rate of the orthogonalised steps, by weight name.
        """
        names, self.live = zip(*trained_weights(model), strict=True)
        self.masters = masters
        self.averages = [weight.clone() for weight in masters]
        self.average_decay = average_decay
        self.steps = 0
        self.groups: dict[tuple[int, int], list[int]] = {}  # indices of matrices by rows and columns
        others = []
        for index, (name, weight) in enumerate(zip(names, self.live, strict=True)):
            is_matrix = weight.ndim > 1 and len(weight) > 1  # one row is a vector with a batch axis
            if is_matrix and re.search(r"(blocks|mid_block)\.", name) and "norm" not in name:
                self.groups.setdefault(tuple(weight.flatten(1).shape), []).append(index)
            else:
                others.append(masters[index])
        device = masters[0].device
        self.momenta = {shape: torch.zeros(len(held), *shape, device=device) for shape, held in self.groups.items()}
        self.rates = {
            shape: torch.tensor([MATRIX_RATE * (rates or {}).get(names[index], 1.0) for index in held], device=device)
            for shape, held in self.groups.items()
        }
        groups = [{"params": others}]  # within a group, an empty list is allowed
        self.adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.99), weight_decay=0.01, fused=masters[0].is_cuda)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients of the live weights, clipped to a norm of 1, and clear them."""
        # In the layout of the masters: fused AdamW requires it and convolutions change it.
        gradients = [
            torch.empty_like(master).copy_(weight.grad) for master, weight in zip(self.masters, self.live, strict=True)
        ]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp_max(1.0))
        for master, live, gradient in zip(self.masters, self.live, gradients, strict=True):
            master.grad, live.grad = gradient, None
        for shape, held in self.groups.items():
            gradient = torch.stack([gradients[index].flatten(1) for index in held])
            momentum = self.momenta[shape].mul_(0.95).add_(gradient)
            steps = orthogonalise(gradient + 0.95 * momentum) * (-0.2 * max(shape) ** 0.5 * rate)
            steps *= self.rates[shape].view(-1, 1, 1)
            for index, change in zip(held, steps, strict=True):
                self.masters[index].add_(change.view(self.masters[index].shape))
        self.adamw.param_groups[0]["lr"] = rate
        self.adamw.step()
        torch._foreach_copy_(self.live, self.masters)
        self.steps += 1
        decay = min(self.average_decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.averages, self.masters, 1 - decay)

    @torch.no_grad()
    def load_averages(self) -> None:
        """Copy the averaged weights into the model."""
        torch._foreach_copy_(self.live, self.averages)

    def state_dict(self) -> dict[str, Any]:
        """State needed to resume training, in addition to the model's own weights."""
        held = {"masters": self.masters, "averages": self.averages, "momenta": list(self.momenta.values())}
        return {**held, "adamw": self.adamw.state_dict(), "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict` of the same model; its weights become the rounded masters."""
        for name, held in (("masters", self.masters), ("averages", self.averages), ("momenta", self.momenta.values())):
            for tensor, value in zip(held, state[name], strict=True):
                tensor.copy_(value)
        self.adamw.load_state_dict(state["adamw"])
        self.steps = state["steps"]
        torch._foreach_copy_(self.live, self.masters)


def trained_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and weights of the model that take gradients."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


@torch.no_grad()
def take_weights(weights: Iterable[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy `values` into `weights`, which may have another dtype or layout."""
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def put_in_bf16(flow: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Move a float32 model to `device` in bf16; return its trained weights there in float32."""
    rotation = copy.deepcopy(getattr(flow.transformer, "rope", None))  # its tables, which pipelines keep in float32
    masters = [weight.detach().clone().to(device) for _, weight in trained_weights(flow)]
    flow.to(device, torch.bfloat16).train()
    if rotation is not None:
        flow.transformer.rope = rotation.to(device)
    return masters


def configure_torch() -> None:
    """Apply the settings of every process that trains."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # torch 2.11's cuDNN attention faults in backward at these shapes
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of each matrix [G, R, C] near 1 by five quintic Newton-Schulz iterations in bf16."""
    tall = matrices.shape[1] > matrices.shape[2]
    values = matrices.mT if tall else matrices
    values = (values / (values.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = values @ values.mT
        values = 3.4445 * values + (-4.7750 * gram + 2.0315 * gram @ gram) @ values
    return (values.mT if tall else values).float()


def finite(losses: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the losses as numbers; raises FloatingPointError if one of them is infinite or NaN."""
    values = {name: float(value) for name, value in losses.items()}
    if not all(math.isfinite(value) for value in values.values()):
        raise FloatingPointError(f"training diverged: {values}; lower the rate")
    return values


class Pace:
    """A wall-clock budget: the used fraction, the learning rate at that point, and progress lines.

    The rate warms up over WARMUP of the budget and then falls to 2% of `peak` along a cosine.
    """

    def __init__(self, name: str, seconds: float, peak: float, *, most_steps: int | None = None) -> None:
        self.name, self.seconds, self.peak, self.most_steps = name, seconds, peak, most_steps
        self.started = time.monotonic()
        self.steps = self.pictures = 0
        self.losses: list[dict[str, float]] = []

    @property
    def spent(self) -> float:
        """Used fraction of the budget, 0..1: of the steps if they are limited, else of the time."""
        if self.most_steps is not None:
            return min(1.0, self.steps / self.most_steps)
        return min(1.0, (time.monotonic() - self.started) / self.seconds)

    @property
    def rate(self) -> float:
        if self.spent < WARMUP:
            return self.peak * max(self.spent / WARMUP, 0.01)
        fall = (self.spent - WARMUP) / (1 - WARMUP)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))

    def count(self, pictures: int, losses: Callable[[], dict[str, float]], every: int = 50) -> None:
        """Count one step of `pictures`; every `every` steps print and keep the result of `losses()`."""
        self.steps += 1
        self.pictures += pictures
        if self.steps % every and self.steps != 1:
            return
        values = losses()  # waits for the device, so the time below is correct
        elapsed = time.monotonic() - self.started
        self.losses.append({"step": self.steps, "seconds": round(elapsed, 1), **values})
        shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
        left = max(0.0, self.seconds - elapsed)
        print(
            f"{self.name} {self.steps:5d}  {shown}  {self.pictures / elapsed:6.0f} samples/s  {left:4.0f} s left",
            flush=True,
        )


def draw_bank(
    draw: Callable[[random.Random], Any],
    pack: Callable[[Sequence[Any]], torch.Tensor],
    count: int,
    seed: int,
    *,
    parallel: bool,
) -> tuple[list[str], torch.Tensor]:
    """Prompts and packed numbers of `count` training scenes; the same with one process or several.

    `draw` returns an object with a `.prompt`, and `pack` turns a list of them into numbers [N, K].
    """
    jobs = [(min(CHUNK, count - start), f"{seed} {start}") for start in range(0, count, CHUNK)]
    draw_chunk = partial(_draw_chunk, draw, pack)
    if parallel:
        with ProcessPoolExecutor(8, mp_context=get_context("fork")) as pool:
            parts = list(pool.map(draw_chunk, jobs))
    else:
        parts = [draw_chunk(job) for job in jobs]
    return [prompt for prompts, _ in parts for prompt in prompts], torch.cat([torch.tensor(rows) for _, rows in parts])


def _draw_chunk(
    draw: Callable[[random.Random], Any], pack: Callable[[Sequence[Any]], torch.Tensor], job: tuple[int, str]
) -> tuple[list[str], list[list[float]]]:
    count, seed = job
    rng = random.Random(seed)
    scenes = [draw(rng) for _ in range(count)]
    return [scene.prompt for scene in scenes], pack(scenes).tolist()
