"""LPIPS is there with its weights or says why not."""

import sys
import types

import torch

from dit_accel.tools import metrics as page


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
