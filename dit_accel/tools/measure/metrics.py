"""Metrics between two outputs: PSNR, SSIM, MS-SSIM, FLIP and LPIPS of images and videos, relative error of latents.

Images are PIL images, arrays ``[..., height, width]`` or ``[..., height, width, channels]``, or tensors
``[..., height, width]`` or ``[..., channels, height, width]``; channels are 1, 3 or 4. Values of uint8 run over 0..255,
floating values over 0..1. A video is a stack of images, frames first. Sums are in float64; only one frame at a time is
converted to it. Images of different shapes, of other values, without values or too small are a ShapeError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dit_accel.errors import ShapeError

if TYPE_CHECKING:
    import torch
    from PIL import Image

    ImageLike = Image.Image | np.ndarray | torch.Tensor

IDENTICAL = 100.0  # dB; replaces the infinite PSNR of equal images in means
LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, of R, G, B
SSIM_WINDOW = 11
SSIM_SIGMA = 1.5
SSIM_K1, SSIM_K2 = 0.01, 0.03
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # of MS-SSIM, finest first
MS_SSIM_SIDE = SSIM_WINDOW * 2 ** (len(SCALE_WEIGHTS) - 1)  # 176 pixels: the coarsest scale still has a window
LPIPS_BACKBONE = "alexnet-owt-7be5be79.pth"  # torchvision's, which lpips builds on


def psnr(a: ImageLike, b: ImageLike) -> float:
    """Peak signal-to-noise ratio ``−10 log10(mean((a − b)²))`` in dB, over all values; infinite for equal images.

    For a video the mean is over all frames at once, so that one bad frame counts. Values are scaled to 0..1 first, so
    a uint8 image can be compared with a float image.
    """
    first, second = _same_shape(a, b)
    pairs = zip(first, second, strict=True)
    mean_square = sum(float(np.sum((_unit_range(x) - _unit_range(y)) ** 2)) for x, y in pairs) / first.size
    return math.inf if mean_square == 0.0 else -10.0 * math.log10(mean_square)


def ssim(a: ImageLike, b: ImageLike) -> float:
    """Mean structural similarity in −1..1, 1 for equal images (Wang et al. 2004, equation 13 and section III-C).

    Gaussian window of 11 × 11 pixels with σ = 1.5, K1 = 0.01, K2 = 0.03, over windows inside the image.
    Colours are converted to luma (BT.601); an alpha channel is ignored.
    """
    return _similarity(*_lumas(a, b, "ssim", SSIM_WINDOW))[0]


def ms_ssim(a: ImageLike, b: ImageLike) -> float:
    """Multi-scale structural similarity, 1 for equal images (Wang et al. 2003, equation 7 and section 3.2).

    Five scales, each of half the size of the one before, so that sides have at least 176 pixels; windows and colours as
    in :func:`ssim`. Negative similarities count as 0.
    """
    first, second = _lumas(a, b, "ms_ssim", MS_SSIM_SIDE)
    product = 1.0
    for scale, weight in enumerate(SCALE_WEIGHTS):
        if scale:
            first, second = _halved(first), _halved(second)
        whole, structure = _similarity(first, second)
        product *= max(whole if scale == len(SCALE_WEIGHTS) - 1 else structure, 0.0) ** weight
    return product


def _lumas(a: ImageLike, b: ImageLike, metric: str, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return both images as luma ``[height, width]``, with sides of at least ``least`` pixels."""
    first, second = (_luma(_unit_range(image)) for image in _same_shape(a, b))
    if min(first.shape) < least:
        raise ShapeError(f"{metric} needs images of at least {least} x {least} pixels, got {list(first.shape)}")
    return first, second


def _halved(image: np.ndarray) -> np.ndarray:
    """Mean of each 2 × 2 pixels; an odd last row or column is left out."""
    height, width = (side // 2 for side in image.shape)
    return image[: 2 * height, : 2 * width].reshape(height, 2, width, 2).mean((1, 3))


def _similarity(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return the mean structural similarity of two images, and that of contrast and structure alone."""
    mean_first, mean_second = _blur(first), _blur(second)
    variance_first = _blur(first * first) - mean_first**2
    variance_second = _blur(second * second) - mean_second**2
    covariance = _blur(first * second) - mean_first * mean_second
    c1, c2 = SSIM_K1**2, SSIM_K2**2  # the dynamic range is 1
    structure = (2 * covariance + c2) / (variance_first + variance_second + c2)
    luminance = (2 * mean_first * mean_second + c1) / (mean_first**2 + mean_second**2 + c1)
    return float(np.mean(luminance * structure)), float(np.mean(structure))


def clip_ssim(a: ImageLike, b: ImageLike) -> float:
    return mean_over_frames(ssim, a, b)


def quality(plain: list[Any], fast: list[Any]) -> dict[str, Any]:
    """Compute ``psnr_db`` over all images or frames (None if identical), mean ``ssim``, and ``identical``."""
    arrays = ([*map(np.asarray, side)] for side in (plain, fast))
    frames = [np.concatenate([array if array.ndim == 4 else array[None] for array in side]) for side in arrays]
    decibels = psnr(*frames)
    identical = math.isinf(decibels)
    return {"psnr_db": None if identical else decibels, "ssim": clip_ssim(*frames), "identical": identical}


def mean_over_frames(metric: Callable[[ImageLike, ImageLike], float], a: ImageLike, b: ImageLike) -> float:
    first, second = _same_shape(a, b)
    return float(np.mean([metric(*frames) for frames in zip(first, second, strict=True)]))


def latent_error(estimate: torch.Tensor | np.ndarray, reference: torch.Tensor | np.ndarray) -> float:
    """Relative L2 error ``‖estimate − reference‖ / ‖reference‖`` over all values; 0 for equal tensors."""
    first, second = as_array(estimate).astype(np.float64), as_array(reference).astype(np.float64)
    require_same_shape(first, second)
    distance, norm = (float(np.linalg.norm(values)) for values in (first - second, second))
    if distance == 0.0:
        return 0.0
    return math.inf if norm == 0.0 else distance / norm


def flip_error() -> Callable[[ImageLike, ImageLike], float] | str:
    """Return a function for the mean FLIP over two videos' frames, or the reason why it is unavailable.

    FLIP (Andersson et al. 2020), 0..1, at 67 pixels per degree, is computed by NVIDIA's package ``flip-evaluator``.
    """
    if find_spec("flip_evaluator") is None:
        return "the package flip-evaluator is not installed"
    import flip_evaluator

    def of_frames(first: np.ndarray, second: np.ndarray) -> float:
        images = (np.ascontiguousarray(_unit_range(x)[..., :3], dtype=np.float32) for x in (first, second))
        return float(flip_evaluator.evaluate(*images, "LDR", applyMagma=False)[1])

    return partial(mean_over_frames, of_frames)


def lpips_distance(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], float] | str:
    """Return a function for the mean LPIPS (AlexNet) over two videos' frames, or the reason why it is unavailable.

    Frames are float ``[frames, 3, height, width]`` in 0..1. ``lpips`` and its weights must be on this machine.
    """
    if find_spec("lpips") is None:
        return "the package lpips is not installed"
    import torch

    weights = Path(torch.hub.get_dir(), "checkpoints", LPIPS_BACKBONE)
    if not weights.is_file():
        return f"AlexNet's weights are not in {weights.parent}"
    import lpips

    network = lpips.LPIPS(net="alex", verbose=False).to(device)

    @torch.no_grad()
    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return network(a.to(device), b.to(device), normalize=True).mean().item()

    return distance


def _same_shape(a: ImageLike, b: ImageLike) -> tuple[np.ndarray, np.ndarray]:
    first, second = _channels_last(a, "a"), _channels_last(b, "b")
    require_same_shape(first, second)
    return first, second


def require_same_shape(first: np.ndarray, second: np.ndarray) -> None:
    """Raise a `ShapeError` if two arrays differ in shape or are empty."""
    if first.shape != second.shape:
        raise ShapeError(f"a and b must have the same shape, got {list(first.shape)} and {list(second.shape)}")
    if first.size == 0:
        raise ShapeError(f"a and b must hold values, got shape {list(first.shape)}")


def _channels_last(image: ImageLike, name: str) -> np.ndarray:
    values = as_array(image)
    if hasattr(image, "detach") and values.ndim >= 3:  # a tensor has its channels first
        values = np.moveaxis(values, -3, -1)
    if values.dtype != np.uint8 and not np.issubdtype(values.dtype, np.floating):
        raise ShapeError(f"{name} must hold uint8 (0..255) or floating (0..1) values, got {values.dtype}")
    return values


def _unit_range(values: np.ndarray) -> np.ndarray:
    """Convert uint8 over 0..255 or floats over 0..1 to float64 over 0..1."""
    return values / 255.0 if values.dtype == np.uint8 else values.astype(np.float64)


def as_array(values: ImageLike) -> np.ndarray:
    """Return an image or a tensor as an array on the CPU; floating tensors as float64."""
    if hasattr(values, "detach"):  # a tensor; NumPy knows no bfloat16, and float64 holds every floating dtype exactly
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    return np.asarray(values)


def _luma(image: np.ndarray) -> np.ndarray:
    """Convert one image, channels last or absent, to luma ``[height, width]``."""
    if image.ndim == 2:
        return image
    if image.ndim != 3 or image.shape[-1] not in (1, 3, 4):
        raise ShapeError(f"ssim compares single images of 1, 3 or 4 channels, the last axis, got {list(image.shape)}")
    return image[..., 0] if image.shape[-1] == 1 else image[..., :3] @ LUMA


def _blur(image: np.ndarray) -> np.ndarray:
    """Gaussian mean of every window inside ``image``: ``[height − 10, width − 10]``."""
    offsets = np.arange(SSIM_WINDOW) - SSIM_WINDOW // 2
    weights = np.exp(-(offsets**2) / (2 * SSIM_SIGMA**2))
    weights /= weights.sum()
    for axis in (0, 1):
        lines = np.moveaxis(image, axis, 0)
        inside = len(lines) - SSIM_WINDOW + 1
        blurred = sum(weight * lines[offset : offset + inside] for offset, weight in enumerate(weights))
        image = np.moveaxis(blurred, 0, axis)
    return image
