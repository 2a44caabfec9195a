"""The Ray cluster of a command: which devices its actors take, and what Ray's makers learn of it."""

import os

import pytest
from rich.console import Console

from dit_accel.serving import ray_cluster

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    ("device", "actors", "places"), [(None, None, ("cuda", 4)), (None, 2, ("cuda", 2)), ("cpu", 8, ("cpu", 8))]
)
def test_gpus_are_taken_where_there_are_some(device, actors, places):
    assert ray_cluster.places({"CPU": 64.0, "GPU": 4.0}, device, actors) == places


@pytest.mark.parametrize("given, told", [(None, "0"), ("1", "1")], ids=["unsaid", "allowed"])
def test_a_cluster_that_is_started_here_tells_nobody_of_itself(monkeypatch, given, told):
    """Ray would report its use to its makers unless the user's own environment has a say."""
    started = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    if given is not None:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", given)
    monkeypatch.setattr(ray, "init", lambda **options: started.append((os.environ["RAY_USAGE_STATS_ENABLED"], options)))
    ray_cluster.connect(Console(quiet=True))
    ((enabled, options),) = started
    assert enabled == told and options["include_dashboard"] is options["log_to_driver"] is False
