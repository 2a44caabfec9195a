"""The load test of `dit-accel serve`, a few seconds of it, and what it calls a failure."""

import json

import pytest

from scripts.checks import serving

pytest.importorskip("fastapi")


def test_too_much_load_is_refused_and_nothing_is_lost(tmp_path):
    """Far above the capacity: images, and "busy" for the rest; the server counts the same and ends well."""
    output = tmp_path / "serving.json"
    options = ["--capacity", "0.5", "--half", "1", "--overload", "1", "--factor", "20", "--steps", "1"]
    serving.main(["--output", str(output), *options])
    found = json.loads(output.read_text())
    assert found["failures"] == []
    assert set(found["phases"]["overload"]["answers"]) == {"200", "503"}
    assert found["phases"]["end"]["answers"]["200"] >= 1, "what runs is finished"
    assert found["phases"]["capacity"]["p99_seconds"] > found["phases"]["capacity"]["p50_seconds"] > 0


def test_what_is_wrong_is_told():
    """A request without an answer, a count that differs, memory that grows, and processes that stay."""
    good = {"answers": {"200": 9}, "counted_by_the_server": {"200": 9}, "exit_code": 0, "processes_left": []}
    good |= {"phases": {"half": {"answers": {"200": 9, "503": 2}}}, "memory_mib": [500] * 30 + [100, 101, 100] * 20}
    assert serving.failures(good) == []
    bad = {
        "phases": {"half": {"answers": {"200": 8, "no answer": 1}}},
        "counted_by_the_server": {"200": 8},
        "memory_mib": [100] * 40 + [120] * 20,
        "processes_left": ["raylet"],
    }
    assert serving.failures(good | bad) == [
        "half: 1 answers of no answer",
        "the server counted {'200': 8}, and gave {'200': 9}",
        "memory grew from 100 to 120 MiB",
        "the server ended with 0 and left ['raylet']",
    ]
