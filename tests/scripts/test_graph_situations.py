"""Replayed steps follow whatever changes between runs: the table that `scripts/checks/graphs.py` runs on a GPU, here on
recorded operations whose memory behaves as badly as a GPU's may.
"""

import pytest
import torch

from scripts.checks.graphs_study import situations


@pytest.mark.usefixtures("graph", "own_attention_backend")
@pytest.mark.parametrize("name", situations.SITUATIONS)
def test_replayed_steps_follow_every_change(name):
    """Outputs, symbols, errors and fallbacks equal those of steps without capture, and the last run replays."""
    assert situations.differences(situations.SITUATIONS[name], "cpu", torch.float32) == []


def test_runs_on_several_streams_give_what_they_give_alone():
    assert situations.streams("cpu", torch.float32) == []


def test_a_capture_that_fails_at_its_end_leaves_nothing_behind(graph):
    """Its results are undefined, so neither plans nor weights in 8 bits may be kept."""
    graph.fails = torch.OutOfMemoryError("CUDA out of memory")
    for name in ("layers in 8 bits", "lengths of prompts"):
        wrong = situations.differences(situations.SITUATIONS[name], "cpu", torch.float32)
        assert len(wrong) == 1 and "OutOfMemoryError" in wrong[0]
