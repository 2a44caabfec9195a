"""Learned forecasts and corrections: a polynomial plus what a model fitted to calibration prompts adds to it.

Ridge regressions differ in their features and in the layout of the weights. The penalty draws them towards the
polynomial. A small convolutional network shares its weights over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from scripts.research.learned_study.runs import DIFFERENCES, Case, Run

RIDGES = (1e-3, 1e-2, 1e-1)  # times the mean square of a feature
RECORDS = DIFFERENCES
LATENTS = (*RECORDS, "latents")

Layout = Callable[[torch.Tensor], torch.Tensor]  # [n, maps, C, frames, H, W] to columns [groups, samples, columns]


def per_scalar(maps: torch.Tensor) -> torch.Tensor:
    """One weight a map."""
    return maps.movedim(1, -1).reshape(1, -1, maps.shape[1])


def per_channel(maps: torch.Tensor) -> torch.Tensor:
    """One weight a map and channel."""
    return maps.movedim(2, 0).movedim(2, -1).flatten(1, -2)


def per_patch(maps: torch.Tensor) -> torch.Tensor:
    """The 3 × 3 positions around each position, of all channels."""
    frames = maps.movedim(3, 1).flatten(2, 3).flatten(0, 1)  # [n frames, maps C, H, W]
    return functional.unfold(frames, 3, padding=1).transpose(1, 2).flatten(0, 1)[None]


def bands(maps: torch.Tensor) -> torch.Tensor:
    """Split each map into its mean over positions, low and high frequencies, ``[n, 3 maps, C, frames, H, W]``."""
    mean = maps.mean(dim=(-3, -2, -1), keepdim=True).expand_as(maps)
    low = maps.flatten(0, 3)  # [.., H, W]
    for _ in range(2):
        low = functional.avg_pool2d(low, 3, 1, 1, count_include_pad=False)
    low = low.view_as(maps)
    return torch.cat([mean, low - mean, maps - low], dim=1)


class Model(NamedTuple):
    """Ridge regression: its features, whether they are split into bands, and the layout of its weights."""

    features: Sequence[str]
    layout: Layout
    splits: bool = False

    def columns(self, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the columns ``[groups, samples, columns]`` of the features."""
        maps = torch.stack([found[feature] for feature in self.features if feature in found], dim=1)
        return self.layout(bands(maps) if self.splits else maps)

    def targets(self, values: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[groups, samples, outputs]`` of ``[n, C, frames, H, W]``."""
        if self.layout is per_patch:
            return values.movedim(1, -1).flatten(0, -2)[None]  # all channels of a position
        return self.layout(values[:, None])

    def fit(self, run: Run, at: Sequence[int], target: int, fitted: slice, strengths: Sequence[float]) -> torch.Tensor:
        """Return the weights ``[strengths, groups, columns, outputs]`` of a forecast, fitted to samples of a run."""
        found = run.features(at, target, fitted)
        missed = run.outputs[target][fitted].float() - found["polynomial"]
        return ridge(self.columns(found), self.targets(missed), strengths)

    def forecast(self, found: Mapping[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return the forecasts ``[strengths, n, C, frames, H, W]`` of fitted weights."""
        polynomial = found["polynomial"]
        n, channels, *place = polynomial.shape
        made = self.columns(found) @ weights
        if self.layout is per_patch:
            made = made.view(len(weights), n, *place, channels).movedim(-1, 2)
        elif self.layout is per_channel:
            made = made.view(len(weights), channels, n, *place).transpose(1, 2)
        return polynomial + made.view(len(weights), n, channels, *place)


MODELS = {
    "records": Model(RECORDS, per_scalar),
    "records, channel": Model(RECORDS, per_channel),
    "records, band": Model(RECORDS, per_scalar, splits=True),
    "latents": Model(LATENTS, per_scalar),
    "latents, channel": Model(LATENTS, per_channel),
    "latents, band": Model(LATENTS, per_scalar, splits=True),
    "records, patch": Model(RECORDS, per_patch),
    "latents, patch": Model(LATENTS, per_patch),
}


def ridge(columns: torch.Tensor, targets: torch.Tensor, strengths: Sequence[float]) -> torch.Tensor:
    """Return the weights ``[strengths, groups, columns, outputs]`` of ridge regressions.

    Args:
        columns: float32 ``[groups, samples, columns]``.
        targets: float32 ``[groups, samples, outputs]``.
        strengths: penalties, relative to the mean square of a column.
    """
    square = (columns.transpose(1, 2) @ columns).double()
    scale = square.diagonal(dim1=1, dim2=2).clamp_min(1e-30).rsqrt()[:, :, None]
    square = square * scale * scale.transpose(1, 2)
    along = (columns.transpose(1, 2) @ targets).double() * scale
    penalties = torch.tensor(strengths, dtype=square.dtype, device=square.device).view(-1, 1, 1, 1)
    eye = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    solved = torch.linalg.solve(square + penalties * eye, along.expand(len(strengths), *along.shape))
    return (solved * scale).float()


class Network(torch.nn.Module):
    """Small convolutional network that adds to the polynomial, with a receptive field of 7 × 7 positions."""

    def __init__(self, channels: int, width: int = 64) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(len(LATENTS) * channels + 3, width, 3, padding=1),
            torch.nn.SiLU(),
            torch.nn.Conv2d(width, width, 3, padding=1),
            torch.nn.SiLU(),
            torch.nn.Conv2d(width, channels, 3, padding=1),
        )
        torch.nn.init.zeros_(self.layers[-1].weight)

    def forward(self, case: Case, samples: slice, fitted: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the forecasts of some samples, and the size of the polynomial's error on the fitted ones."""
        run, target = case.run, case.target
        found, known = (run.features(case.at, target, part) for part in (samples, fitted))
        size = rms(run.outputs[target][fitted].float() - known["polynomial"])
        empty = torch.zeros_like(found["polynomial"])
        maps = [found[name] / rms(known[name]) if name in found else empty for name in LATENTS]
        n, channels, frames, height, width = empty.shape
        flat = torch.cat(maps, dim=1).movedim(2, 1).flatten(0, 1)
        facts = [run.sigmas[case.at[0]], run.sigmas[target], (case.at[0] - case.at[-1]) / len(case.at)]
        said = torch.tensor(facts, device=flat.device).view(1, -1, 1, 1).expand(len(flat), -1, height, width)
        made = self.layers(torch.cat([flat, said], dim=1)).view(n, frames, channels, height, width)
        return found["polynomial"] + size * made.movedim(2, 1), size


def rms(values: torch.Tensor) -> torch.Tensor:
    """Root of the mean square, float32 ``[]``, above 0."""
    return values.square().mean().sqrt().clamp_min(1e-8)


def train(found: Sequence[Case], fitted: slice, rounds: int) -> Network:
    """Train a network on the calibration samples of many cases."""
    torch.manual_seed(0)
    network = Network(found[0].loop.shape[1]).to(found[0].loop.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=rounds)
    for number in torch.randint(len(found), (rounds,)).tolist():
        case = found[number]
        made, size = network(case, fitted, fitted)
        loss = ((made - case.run.outputs[case.target][fitted].float()) / size).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network
