"""SI-SDR and the ratio of levels against closed forms and an independent formula."""

import math

import numpy as np
import pytest
import torch

from dit_accel.errors import ShapeError
from dit_accel.tools.measure.audio_metrics import audio_quality, rms_ratio, si_sdr
from dit_accel.tools.measure.metrics import IDENTICAL


def noise(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-0.5, 0.5, shape)


PLAIN, OTHER = noise(4000), noise(4000, seed=1)
SILENT = np.zeros(4000)


def test_si_sdr_is_a_function_of_the_correlation():
    """Of signals without mean it is 10·log10(ρ² / (1 − ρ²)) with Pearson's correlation ρ, whatever their means."""
    for share in (1e-4, 0.1, 1.0, 10.0):
        noisy = PLAIN + share * OTHER + 0.25
        rho = np.corrcoef(noisy, PLAIN)[0, 1]
        assert si_sdr(noisy, PLAIN) == pytest.approx(10 * math.log10(rho**2 / (1 - rho**2)), abs=1e-4)


def test_si_sdr_of_orthogonal_distortion_is_the_ratio_of_energies():
    """Two sines of whole periods are orthogonal, so amplitudes of 1 and 0.1 are 20 dB apart."""
    time = np.arange(4000) / 4000
    plain, distortion = np.sin(2 * np.pi * 50 * time), 0.1 * np.sin(2 * np.pi * 120 * time)
    assert si_sdr(plain + distortion, plain) == pytest.approx(20.0)
    assert rms_ratio(plain + distortion, plain) == pytest.approx(10 * math.log10(1.01))


def test_a_factor_changes_the_ratio_of_levels_alone():
    """Level and sign do not count in SI-SDR; the ratio of levels is 20·log10 of the factor's size."""
    noisy = PLAIN + 0.1 * OTHER
    for factor in (0.3, 2.0, -1.0, -0.3):
        assert si_sdr(factor * noisy, PLAIN) == pytest.approx(si_sdr(noisy, PLAIN))
        assert si_sdr(factor * PLAIN, PLAIN) == IDENTICAL
        assert rms_ratio(factor * PLAIN, PLAIN) == pytest.approx(20 * math.log10(abs(factor)))


@pytest.mark.parametrize(
    ("sound", "plain", "quality"),
    [
        (PLAIN, PLAIN, (100.0, 0.0)),
        (SILENT, SILENT, (100.0, 0.0)),
        (SILENT + 0.1, SILENT, (100.0, 0.0)),  # a constant is no sound
        (1e-6 * OTHER, 1e-6 * PLAIN, (100.0, 0.0)),
        (SILENT, PLAIN, (-100.0, -100.0)),
        (PLAIN, SILENT, (-100.0, 100.0)),
        (np.where(np.arange(4000) == 7, np.nan, PLAIN), PLAIN, (math.nan, math.nan)),
        (PLAIN, np.where(np.arange(4000) == 7, np.nan, PLAIN), (math.nan, math.nan)),
    ],
    ids=["equal", "both-silent", "constant", "inaudible", "silent", "plain-silent", "nan", "plain-nan"],
)
def test_limits(sound, plain, quality):
    """Equal and silent sounds have finite values, and NaN stays NaN."""
    assert tuple(audio_quality(sound, plain).values()) == pytest.approx(quality, nan_ok=True)


def test_channels_are_one_signal():
    """A quiet channel weighs little, and a changed balance counts, while the mean is of each channel."""
    plain = np.stack([noise(4000), 1e-3 * noise(4000, seed=2)])
    noisy = plain.copy()
    noisy[1] = 1e-3 * noise(4000, seed=3)
    assert si_sdr(noisy[1], plain[1]) < 0 and si_sdr(noisy, plain) > 50
    stereo = np.stack([noise(4000), noise(4000, seed=2)])
    assert si_sdr(stereo * [[1.0], [0.5]], stereo) < 15 and si_sdr(0.5 * stereo, stereo) == IDENTICAL
    assert si_sdr(stereo + np.array([[0.1], [-0.2]]), stereo) == IDENTICAL


def test_tensors_are_sounds_too():
    """Their values count as they are, in float64."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        noisy, plain = (torch.from_numpy(sound).to(dtype) for sound in (PLAIN + 0.1 * OTHER, PLAIN))
        assert si_sdr(noisy, plain) == si_sdr(noisy.double().numpy(), plain.double().numpy())


def test_what_cannot_be_compared_is_refused():
    for a, b, message in (
        (PLAIN, PLAIN[1:], r"same shape, got \[4000\] and \[3999\]"),
        (np.zeros((2, 0)), np.zeros((2, 0)), r"must hold values, got shape \[2, 0\]"),
        (np.zeros(9, np.int16), np.zeros(9, np.int16), r"floating values \(-1\.\.1\), got int16 and int16"),
    ):
        for metric in (si_sdr, rms_ratio):
            with pytest.raises(ShapeError, match=message):
                metric(a, b)
