"""Fixtures of tests of fused blocks."""

import pytest

from dit_accel.models.driver import FamilyDriver
from dit_accel.models.fused.block_hook import BlockHook


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Blocks run through the fused ops, whose references run on the CPU."""
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)


@pytest.fixture
def by_hand(monkeypatch):
    """A list that gets an entry when a hand-written block computes: its bits may be those of diffusers' block."""
    found, runs_attention = [], BlockHook.runs_attention
    monkeypatch.setattr(BlockHook, "runs_attention", lambda *given: (found.append(1), runs_attention(*given))[1])
    return found
