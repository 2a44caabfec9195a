"""Metrics between two sounds: scale-invariant signal-to-distortion ratio, and the ratio of their levels, in dB.

Sounds are arrays or tensors of floating amplitudes in −1..1, ``[samples]`` or ``[channels, samples]``. The mean of each
channel is subtracted first. All channels then count as one signal: a changed balance between them is distortion, and a
quiet channel weighs little. A signal below half a step of 16 bits counts as silence. Results are limited to ±100 dB.
Sounds of different shapes or without floating values are a ShapeError; values that are not finite give NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dit_accel.errors import ShapeError
from dit_accel.tools.measure.metrics import IDENTICAL, as_array, require_same_shape

if TYPE_CHECKING:
    import torch

    Sound = np.ndarray | torch.Tensor

SILENCE = 2.0**-16  # root mean square


def audio_quality(estimate: Sound, reference: Sound) -> dict[str, float]:
    """Return :func:`si_sdr` as ``si_sdr_db`` and :func:`rms_ratio` as ``rms_ratio_db``."""
    return {"si_sdr_db": si_sdr(estimate, reference), "rms_ratio_db": rms_ratio(estimate, reference)}


def si_sdr(estimate: Sound, reference: Sound) -> float:
    """Scale-invariant signal-to-distortion ratio in dB (Le Roux et al. 2019, equation 5).

    The level and the sign of the estimate have no effect. Equal sounds give 100 dB, silence in one alone −100 dB.
    """
    signal, plain = _signals(estimate, reference)
    if not signal.any() or not plain.any():
        return -IDENTICAL if signal.any() or plain.any() else IDENTICAL
    target = (signal @ plain) / (plain @ plain) * plain
    return _decibels(target, signal - target)


def rms_ratio(estimate: Sound, reference: Sound) -> float:
    """Root mean square of the estimate over that of the reference, in dB: 0 for equal levels and silence in both."""
    return _decibels(*_signals(estimate, reference))


def _signals(estimate: Sound, reference: Sound) -> tuple[np.ndarray, np.ndarray]:
    first, second = as_array(estimate), as_array(reference)
    require_same_shape(first, second)
    if not all(np.issubdtype(sound.dtype, np.floating) for sound in (first, second)):
        raise ShapeError(f"sounds must hold floating values (-1..1), got {first.dtype} and {second.dtype}")
    return _signal(first), _signal(second)


def _signal(sound: np.ndarray) -> np.ndarray:
    """Return a sound as float64 ``[channels · samples]`` without the channels' means, zeros for silence."""
    values = sound.astype(np.float64)
    values = (values - values.mean(-1, keepdims=True)).ravel()
    return np.zeros_like(values) if values @ values < SILENCE**2 * values.size else values


def _decibels(signal: np.ndarray, other: np.ndarray) -> float:
    energy, of_other = signal @ signal, other @ other
    if energy == of_other:
        return 0.0
    if energy == 0.0 or of_other == 0.0:
        return -IDENTICAL if energy == 0.0 else IDENTICAL
    return float(np.clip(10.0 * math.log10(energy / of_other), -IDENTICAL, IDENTICAL))
