"""What tests of the scripts share."""

import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def train(monkeypatch):
    """Runs ``train_demo.py`` with --smoke and the given arguments."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import train_demo

    precision = torch.get_float32_matmul_precision()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # else the script sets it, for good

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_demo.py", "--smoke", *map(str, arguments)])
        train_demo.main()

    yield run
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.benchmark = False
