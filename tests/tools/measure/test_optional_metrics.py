"""Metrics of other packages are there with their packages, or say why not."""

import sys
import types

import numpy as np
import pytest
import torch

from dit_accel.tools.measure import metrics as page


def test_without_package_or_weights_the_reason_is_told(monkeypatch, tmp_path):
    """Nothing is downloaded."""
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    assert page.lpips_distance(torch.device("cpu")) == "the package lpips is not installed"
    monkeypatch.setattr(page, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert page.lpips_distance(torch.device("cpu")) == f"AlexNet's weights are not in {tmp_path / 'checkpoints'}"


def test_with_both_frames_are_judged(monkeypatch, tmp_path):
    """The network gets both videos, in 0..1, and its mean over frames comes back."""

    class Network(torch.nn.Module):
        def forward(self, a, b, normalize):
            assert normalize
            return (a - b).abs().mean((1, 2, 3))

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / page.LPIPS_BACKBONE).touch()
    monkeypatch.setattr(page, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=lambda net, verbose: Network()))
    distance = page.lpips_distance(torch.device("cpu"))
    assert distance(torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)) == 1.0


def test_flip_is_the_mean_over_frames(monkeypatch):
    """The package gets each pair of frames as float32 in 0..1, channels last; without it the reason is told."""
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    assert page.flip_error() == "the package flip-evaluator is not installed"

    def evaluate(reference, test, kind, applyMagma):
        assert (reference.dtype, reference.shape, kind, applyMagma) == (np.float32, (4, 6, 3), "LDR", False)
        return None, abs(reference - test).mean(), {}

    monkeypatch.setattr(page, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "flip_evaluator", types.SimpleNamespace(evaluate=evaluate))
    clip = torch.zeros(2, 3, 4, 6, dtype=torch.bfloat16)
    other = clip.clone()
    other[1] = 0.5
    assert page.flip_error()(clip, other) == pytest.approx(0.25)
