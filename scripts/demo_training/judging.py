"""Measure images and videos: which attributes of the prompts they show, and how they differ from plain ones.

Images are float [N, 3, H, W] in 0..1, videos [N, F, 3, H, W], as from `exporting.paint`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dit_accel.tools.metrics import IDENTICAL, clip_ssim, psnr

from . import clip_reading, reading
from .clip_prompts import ClipScene
from .prompts import HeldOutPrompt
from .scenes import Scene
from .texture_demo import read_sharpness

FRAMES_APART = 8  # SSIM and LPIPS are slow, so they compare every eighth frame of a video
GREY_LEVELS = 255


def attributes(made: torch.Tensor, prompts: Sequence[HeldOutPrompt]) -> dict[str, float] | None:
    """Share of prompts whose attributes the pixel readers find correct; None without readable attributes, as for
    textures.
    """
    for kind, read, agreement in (
        (Scene, reading.read_pictures, reading.agreement),
        (ClipScene, clip_reading.read_clips, clip_reading.agreement),
    ):
        places = [place for place, prompt in enumerate(prompts) if isinstance(prompt.scene, kind)]
        if places:
            shown = made[places] if kind is Scene else made[places].transpose(1, 2)
            return agreement(read(shown), [prompts[place].scene for place in places])
    return None


def differences(
    made: torch.Tensor,
    plain: torch.Tensor,
    device: str = "cpu",
    lpips: Callable[[torch.Tensor, torch.Tensor], float] | None = None,
) -> dict[str, list[Any]]:
    """Differences between outputs and plain images or videos, in lists with one entry per prompt.

    `psnr` in dB, `ssim`, and `lpips` if given. `sharpness` (differences of neighbouring pixels) and `contrast`
    (standard deviation of channels) are relative to the plain output's. In grey levels of 255: `means` and `deviations`
    of the three channels; `colour`, the distance of their means from the plain ones'; and `histogram`, the earth
    mover's distance between the histograms. The last two are means over channels.
    """
    found = [_difference(*pair, device, lpips) for pair in zip(made, plain, strict=True)]
    return {key: [each[key] for each in found] for key in found[0]}


def _difference(one: torch.Tensor, plain: torch.Tensor, device: str, lpips: Any) -> dict[str, Any]:
    frames = [each if each.ndim == 4 else each[None] for each in (one, plain)]  # [F, 3, H, W]
    some = [each[::FRAMES_APART] for each in frames]
    values = [each.to(device).transpose(0, 1).flatten(1) for each in frames]  # [3, P]
    means, plain_means = (GREY_LEVELS * each.mean(1) for each in values)
    deviations, plain_deviations = (GREY_LEVELS * each.std(1) for each in values)
    moved = values[0].sort(1).values - values[1].sort(1).values
    sharpness, plain_sharpness = (sum(read_sharpness(each.to(device))) for each in frames)
    found = {
        "psnr": min(psnr(*frames), IDENTICAL),
        "ssim": clip_ssim(*some),
        "sharpness": sharpness / plain_sharpness,
        "contrast": float((deviations / plain_deviations).mean()),
        "colour": float((means - plain_means).abs().mean()),
        "histogram": float(GREY_LEVELS * moved.abs().mean()),
    }
    found |= {} if lpips is None else {"lpips": lpips(*some)}
    rounded = {key: round(value, 4) for key, value in found.items()}
    return rounded | {"means": _rounded(means), "deviations": _rounded(deviations)}


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 2) for value in values.tolist()]
