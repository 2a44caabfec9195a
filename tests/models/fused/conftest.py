"""Fixtures of tests of fused blocks."""

import pytest

from dit_accel.models.driver import FamilyDriver
from dit_accel.models.fused.block_hook import BlockHook


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Blocks run through the fused ops, whose references run on the CPU, and padding is cut off."""
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    monkeypatch.setattr(FamilyDriver, "cuts_padding", lambda driver, *_: driver.family.cut is not None)


@pytest.fixture
def by_hand(monkeypatch):
    """A list with an entry for each block that computes by hand, True if its attention does so too."""
    found, runs_attention = [], BlockHook.runs_attention

    def noting(*call):
        found.append(runs_attention(*call))
        return found[-1]

    monkeypatch.setattr(BlockHook, "runs_attention", noting)
    return found
