"""Fixture of tests of fused blocks."""

import pytest

from dit_accel.models.call_facts import CallReader


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Blocks run through the fused ops, whose references run on the CPU."""
    monkeypatch.setattr(CallReader, "fuses_kernels", lambda driver, x: True)
