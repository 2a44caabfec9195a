"""PSNR, SSIM and the latent error against closed forms and an independent naive computation."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel.errors import ShapeError
from dit_accel.tools.measure.metrics import _halved, clip_ssim, latent_error, ms_ssim, psnr, ssim


def _noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


def _naive_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Wang et al. 2004 window by window, with a two-dimensional weight table and centred moments."""
    ys, xs = np.mgrid[-5:6, -5:6]
    weight = np.exp(-(xs**2 + ys**2) / (2 * 1.5**2))
    weight /= weight.sum()
    values = []
    for top in range(a.shape[0] - 10):
        for left in range(a.shape[1] - 10):
            x, y = a[top : top + 11, left : left + 11], b[top : top + 11, left : left + 11]
            mx, my = (weight * x).sum(), (weight * y).sum()
            sxx, syy = (weight * (x - mx) ** 2).sum(), (weight * (y - my) ** 2).sum()
            sxy = (weight * (x - mx) * (y - my)).sum()
            luminance = (2 * mx * my + 0.01**2) / (mx**2 + my**2 + 0.01**2)
            structure = (2 * sxy + 0.03**2) / (sxx + syy + 0.03**2)
            values.append(luminance * structure)
    return float(np.mean(values))


@pytest.mark.parametrize("offset", [1, 5, 64], ids="offset-{}".format)
def test_psnr_of_a_constant_offset_is_20_log10_of_its_inverse(offset):
    """A constant difference of d grey levels gives 20·log10(255 / d) dB."""
    a = np.full((9, 7, 3), 100, dtype=np.uint8)
    assert psnr(a, a + np.uint8(offset)) == pytest.approx(20 * math.log10(255 / offset), abs=1e-9)


def test_psnr_does_not_wrap_around():
    """0 against 255 is the largest difference, 0 dB, in either order."""
    black, white = np.zeros((4, 4), np.uint8), np.full((4, 4), 255, np.uint8)
    assert psnr(black, white) == psnr(white, black) == pytest.approx(0.0, abs=1e-12)


def test_equal_pictures_are_perfect():
    """Equal images have infinite PSNR, SSIM 1 and latent error 0."""
    picture = _noise(16, 16, 3)
    assert psnr(picture, picture.copy()) == math.inf
    assert ssim(picture, picture.copy()) == pytest.approx(1.0, abs=1e-12)
    assert latent_error(picture, picture.copy()) == 0.0


@pytest.mark.parametrize("shape", [(11, 11), (13, 19), (24, 12)], ids=str)
def test_ssim_matches_the_naive_computation(shape):
    """The separable filter agrees with explicit windows to float64 accuracy, down to a single window."""
    a = _noise(*shape)
    b = np.clip(a + 0.2 * _noise(*shape, seed=1) - 0.1, 0, 1)
    assert ssim(a, b) == pytest.approx(_naive_ssim(a, b), abs=1e-12)


def test_ssim_of_constant_pictures_is_the_luminance_term():
    """Without structure only (2·μa·μb + C1) / (μa² + μb² + C1) remains, with C1 = 0.01²."""
    expected = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    assert ssim(np.full((20, 20), 0.2), np.full((20, 20), 0.6)) == pytest.approx(expected, abs=1e-9)


def test_ssim_of_colour_is_that_of_its_luma():
    """Channels count by BT.601 weights, and alpha not at all."""
    a, b = _noise(16, 16, 4), _noise(16, 16, 4, seed=1)
    luma = np.array([0.299, 0.587, 0.114])
    assert ssim(a, b) == pytest.approx(ssim(a[..., :3] @ luma, b[..., :3] @ luma), abs=1e-12)


def test_ms_ssim_judges_luminance_at_the_coarsest_scale_alone():
    """Constant images differ in luminance only, which counts with the last weight."""
    a, b = np.full((176, 180), 0.25), np.full((176, 180), 0.75)
    term = (2 * 0.25 * 0.75 + 1e-4) / (0.25**2 + 0.75**2 + 1e-4)
    assert ms_ssim(a, b) == pytest.approx(term**0.1333)


def test_each_scale_is_the_mean_of_four_pixels():
    """Of an image that is no square; an odd last row or column is left out."""
    assert _halved(np.arange(15.0).reshape(3, 5)).tolist() == [[3.0, 5.0]]
    assert _halved(np.arange(12.0).reshape(6, 2)).tolist() == [[1.5], [5.5], [9.5]]


def test_ms_ssim_forgives_fine_errors():
    """Noise of single pixels costs less than in SSIM, and any error costs something."""
    image = np.kron(_noise(24, 24), np.ones((8, 8)))
    fine, coarse = 0.2 * _noise(192, 192, seed=1), 0.2 * np.kron(_noise(24, 24, seed=2), np.ones((8, 8)))
    assert ms_ssim(image, image) == pytest.approx(1)
    assert ms_ssim(image, image + fine) > ssim(image, image + fine)
    assert ms_ssim(image, image + coarse) < 1


def test_a_clip_counts_by_all_of_its_frames():
    """PSNR uses the mean square over frames, and SSIM the mean of the frames': one bad frame of three counts."""
    clip = (255 * _noise(3, 16, 16, 3)).astype(np.uint8)
    other = clip.copy()
    other[1] = 255 - other[1]
    squares = ((clip / 255 - other / 255) ** 2).mean(axis=(1, 2, 3))
    assert psnr(clip, other) == pytest.approx(-10 * math.log10(squares[1] / 3))
    frames = [ssim(a, b) for a, b in zip(clip, other, strict=True)]
    assert frames[0] == frames[2] == pytest.approx(1.0) and frames[1] < 0.5
    assert clip_ssim(clip, other) == pytest.approx(sum(frames) / 3)
    tensors = [torch.from_numpy(side).permute(0, 3, 1, 2) for side in (clip, other)]
    assert clip_ssim(*tensors) == pytest.approx(clip_ssim(clip, other))


@pytest.mark.parametrize("metric", [psnr, clip_ssim], ids=["psnr", "clip_ssim"])
def test_long_clips_are_compared_frame_by_frame(metric):
    """Memory allocated meanwhile is less than one of the videos, though float64 takes eight times its space."""
    clips = [np.full((256, 32, 32, 3), level, np.uint8) for level in (10, 90)]
    tracemalloc.start()
    try:
        metric(*clips)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < clips[0].nbytes


@pytest.mark.parametrize("metric", [psnr, ssim], ids=["psnr", "ssim"])
def test_every_representation_of_a_picture_gives_the_same_number(metric):
    """PIL, uint8 and float arrays, and tensors with channels first agree, mixed or not."""
    a, b = ((255 * _noise(14, 18, 3, seed=seed)).astype(np.uint8) for seed in (0, 1))
    expected = metric(a, b)
    assert metric(Image.fromarray(a), Image.fromarray(b)) == expected
    assert metric(a / 255.0, Image.fromarray(b)) == pytest.approx(expected, abs=1e-9)
    tensors = [torch.from_numpy(picture).permute(2, 0, 1) for picture in (a, b)]
    assert metric(*tensors) == pytest.approx(expected, abs=1e-9)
    assert metric(tensors[0].double() / 255, b) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_latent_error_of_a_scaled_tensor_is_the_scale(dtype):
    """An estimate of 1.5·F is off by half of F in every dtype (0.5 is exact in all of them)."""
    reference = torch.arange(1, 33).reshape(2, 4, 4).to(dtype)
    assert latent_error(1.5 * reference, reference) == pytest.approx(0.5, abs=1e-12)


def test_latent_error_is_relative_to_the_reference():
    """Swapping the arguments changes the denominator; against zeros the error is infinite."""
    small, large = torch.full((3,), 1.0), torch.full((3,), 4.0)
    assert latent_error(small, large) == pytest.approx(0.75)
    assert latent_error(large, small) == pytest.approx(3.0)
    assert latent_error(small, torch.zeros(3)) == math.inf


@pytest.mark.parametrize("metric", [psnr, ssim, latent_error], ids=["psnr", "ssim", "latent_error"])
def test_different_shapes_are_refused(metric):
    """Nothing broadcasts: both shapes are named."""
    with pytest.raises(ShapeError, match=r"same shape, got \[16, 16\] and \[16, 12\]"):
        metric(_noise(16, 16), _noise(16, 12))


@pytest.mark.parametrize(
    ("metric", "picture", "message"),
    [
        (psnr, np.zeros((12, 12), np.int64), "uint8 .* or floating .* got int64"),
        (ssim, np.zeros((8, 40)), r"at least 11 x 11 pixels, got \[8, 40\]"),
        (ms_ssim, np.zeros((175, 300)), r"at least 176 x 176 pixels, got \[175, 300\]"),
        (ssim, np.zeros((2, 16, 16, 3)), r"single images .* got shape \[2, 16, 16, 3\]"),
        (psnr, np.zeros((0, 4)), r"must hold values, got shape \[0, 4\]"),
    ],
    ids=["integers", "too-small", "too-small-for-scales", "batch", "empty"],
)
def test_what_cannot_be_compared_is_refused(metric, picture, message):
    """Each error names the requirement and the given value."""
    with pytest.raises(ShapeError, match=message):
        metric(picture, picture)
