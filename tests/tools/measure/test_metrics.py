"""PSNR, SSIM and the latent error against closed forms and an independent naive computation."""

import math
import sys
import tracemalloc
import types

import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel.errors import ShapeError
from dit_accel.tools.measure import metrics as page
from dit_accel.tools.measure.metrics import _halved, clip_ssim, latent_error, ms_ssim, psnr, ssim

METRICS = (psnr, ssim, latent_error)


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


def test_psnr_of_a_constant_offset_is_20_log10_of_its_inverse():
    """A constant difference of d grey levels gives 20·log10(255 / d) dB, in either order."""
    for offset in (1, 5, 64, 255):
        a, b = (np.full((9, 7, 3), level, dtype=np.uint8) for level in (0, offset))
        assert psnr(a, b) == psnr(b, a) == pytest.approx(20 * math.log10(255 / offset), abs=1e-9)


def test_ssim_matches_the_naive_computation():
    """The separable filter agrees with explicit windows to float64 accuracy, down to a single window."""
    for shape in ((11, 11), (13, 19), (24, 12)):
        a = _noise(*shape)
        b = np.clip(a + 0.2 * _noise(*shape, seed=1) - 0.1, 0, 1)
        assert ssim(a, b) == pytest.approx(_naive_ssim(a, b), abs=1e-12)


def test_ssim_of_constant_images_is_the_luminance_term():
    """Only (2·μa·μb + C1) / (μa² + μb² + C1) remains, with C1 = 0.01², and of five scales only at the coarsest."""
    term = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    a, b = np.full((176, 180), 0.2), np.full((176, 180), 0.6)
    assert ssim(a, b) == pytest.approx(term, abs=1e-9)
    assert ms_ssim(a, b) == pytest.approx(term**0.1333)


def test_ssim_of_colour_is_that_of_its_luma():
    """Channels count by BT.601 weights, and alpha not at all; equal images have SSIM 1."""
    a, b = _noise(16, 16, 4), _noise(16, 16, 4, seed=1)
    luma = np.array([0.299, 0.587, 0.114])
    assert ssim(a, b) == pytest.approx(ssim(a[..., :3] @ luma, b[..., :3] @ luma), abs=1e-12)
    assert ssim(a, a.copy()) == pytest.approx(1.0, abs=1e-12)


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
    clips = [np.full((64, 32, 32, 3), level, np.uint8) for level in (10, 90)]
    tracemalloc.start()
    try:
        metric(*clips)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * clips[0].nbytes


@pytest.mark.parametrize("metric", [psnr, ssim], ids=["psnr", "ssim"])
def test_every_representation_of_an_image_gives_the_same_number(metric):
    """PIL, uint8 and float arrays, and tensors with channels first agree, mixed or not."""
    a, b = ((255 * _noise(14, 18, 3, seed=seed)).astype(np.uint8) for seed in (0, 1))
    expected = metric(a, b)
    first, second = (torch.from_numpy(image).permute(2, 0, 1) for image in (a, b))
    assert metric(Image.fromarray(a), Image.fromarray(b)) == expected
    for pair in ((a / 255.0, Image.fromarray(b)), (first, second), (first.double() / 255, b)):
        assert metric(*pair) == pytest.approx(expected, abs=1e-9)


def test_latent_error_is_relative_to_the_reference():
    """An estimate of 1.5·F is off by half of F in every dtype; against zeros the error is infinite. F has none."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        reference = torch.arange(1, 33).reshape(2, 4, 4).to(dtype)
        assert latent_error(1.5 * reference, reference) == pytest.approx(0.5, abs=1e-12)
        assert latent_error(reference, 4 * reference) == pytest.approx(0.75)
        assert latent_error(reference, 0 * reference) == psnr(0.0 * reference, 0.0 * reference) == math.inf
        assert latent_error(reference, reference.clone()) == 0.0


SQUARE = np.zeros((16, 16))


@pytest.mark.parametrize(
    ("metric", "a", "b", "message"),
    [
        *((metric, SQUARE, SQUARE[:, :12], r"same shape, got \[16, 16\] and \[16, 12\]") for metric in METRICS),
        (psnr, *[np.zeros((12, 12), np.int64)] * 2, "uint8 .* or floating .* got int64"),
        (ssim, *[np.zeros((8, 40))] * 2, r"at least 11 x 11 pixels, got \[8, 40\]"),
        (ms_ssim, *[np.zeros((175, 300))] * 2, r"at least 176 x 176 pixels, got \[175, 300\]"),
        (ssim, *[np.zeros((2, 16, 16, 3))] * 2, r"single images .* got \[2, 16, 16, 3\]"),
        (psnr, *[np.zeros((0, 4))] * 2, r"must hold values, got shape \[0, 4\]"),
    ],
)
def test_what_cannot_be_compared_is_refused(metric, a, b, message):
    """Nothing broadcasts; each error names the requirement and the given value."""
    with pytest.raises(ShapeError, match=message):
        metric(a, b)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A function that installs a package that the tests bring, with weights; before its call none is installed."""
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def install(name, **attributes):
        monkeypatch.setattr(page, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**attributes))

    return install


def test_lpips_is_there_with_its_package_and_weights(installed, tmp_path):
    """Nothing is downloaded. The network gets both videos, in 0..1, and its mean over frames comes back."""

    class Network(torch.nn.Module):
        def forward(self, a, b, normalize):
            assert normalize
            return (a - b).abs().mean((1, 2, 3))

    assert page.lpips_distance(torch.device("cpu")) == "the package lpips is not installed"
    installed("lpips", LPIPS=lambda net, verbose: Network())
    assert page.lpips_distance(torch.device("cpu")) == f"AlexNet's weights are not in {tmp_path / 'checkpoints'}"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / page.LPIPS_BACKBONE).touch()
    assert page.lpips_distance(torch.device("cpu"))(torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)) == 1.0


def test_flip_is_the_mean_over_frames(installed):
    """The package gets each pair of frames as float32 in 0..1, channels last."""

    def evaluate(reference, test, kind, applyMagma):
        assert (reference.dtype, reference.shape, kind, applyMagma) == (np.float32, (4, 6, 3), "LDR", False)
        return None, abs(reference - test).mean(), {}

    assert page.flip_error() == "the package flip-evaluator is not installed"
    installed("flip_evaluator", evaluate=evaluate)
    plain = torch.zeros(2, 3, 4, 6, dtype=torch.bfloat16)
    other = plain.clone()
    other[1] = 0.5
    assert page.flip_error()(plain, other) == pytest.approx(0.25)
