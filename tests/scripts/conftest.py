"""Shared fixtures for the tests of scripts."""

import sys

import pytest
import torch


@pytest.fixture
def train(monkeypatch):
    """Runs ``scripts.demo_training.train`` with --smoke and the given arguments."""
    from scripts.demo_training import train as training

    precision = torch.get_float32_matmul_precision()

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", "--smoke", *map(str, arguments)])
        training.main()

    yield run
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.benchmark = False
