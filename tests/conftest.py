"""Shared fixtures. Without a GPU Triton kernels run in its interpreter, chosen here before triton is imported."""

import gc
import os
import sys
from pathlib import Path

import pytest

if sys.dont_write_bytecode and "PYTHONPYCACHEPREFIX" not in os.environ:
    # Each process that a test starts would compile torch and diffusers again, which takes longer than most tests.
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch

from tests.triton_interpreter import spare_repetition

gc.disable()  # until the tests are collected: nothing of what imports make is garbage
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    spare_repetition()


# Fixtures of these start several processes. Workers share the last tests among them, so each would start its own.
FIRST = ("tests/test_parallel.py", "tests/stages/test_sharing.py", "tests/test_site.py")


def pytest_collection_modifyitems(items):
    """Run tests with costly fixtures first, where one worker has them all."""
    items.sort(key=lambda item: item.location[0] not in FIRST)


def pytest_collection_finish():
    """Collect garbage from here on, but look only at objects that tests make: a fifth of their time otherwise."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def shared_pipelines_stay_as_they_are():
    """No test changes what another one gets."""
    yield
    if (tiny := sys.modules.get("tests.models.tiny")) is not None:
        tiny.require_unchanged()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs dit-accel with arguments, inside an empty folder."""
    from typer.testing import CliRunner

    from dit_accel.cli import app

    monkeypatch.chdir(tmp_path)

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})

    return invoke
