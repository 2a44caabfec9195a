"""dit_accel/tools/measure/origin.py: what is noted of a measurement."""

from pathlib import Path

import pytest

from dit_accel.tools.measure import origin

ROOT = Path(__file__).parents[3]


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path):
    """An installed package may lie inside of another repository, whose commit is not its own."""
    assert origin.commit_of(tmp_path) is None and origin.commit_of(ROOT / "dit_accel") is None


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the tests run outside of a checkout")
def test_the_commit_is_the_checkouts(monkeypatch):
    monkeypatch.delenv("DIT_ACCEL_COMMIT", raising=False)
    assert origin.describe_run("cpu")["commit"] == origin.commit_of(ROOT)
    monkeypatch.setenv("DIT_ACCEL_COMMIT", "abc")
    assert origin.describe_run("cpu")["commit"] == "abc"
