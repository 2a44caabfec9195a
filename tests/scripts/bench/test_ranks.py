"""The benchmark of several GPUs runs at toy size, on two processes of a CPU."""

import json

from tests.forked import on_ranks, results_of_ranks
from tests.test_parallel import ROUNDING


def test_every_row_is_measured(tmp_path):
    """Several devices give the result of one."""
    found = results_of_ranks("tests.parallel_ranks", 2, tmp_path, "speed_script")
    assert on_ranks(found, "speed_script") == [{"code": 0}, {"code": 0}]
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert not any("error" in row for row in rows)
    exact = next(row for row in rows if row["of"] == "flux, 2 devices" and row["run"] == "exact")
    assert exact["relative_error"] < ROUNDING and exact["over_one"] > 0
    assert "| flux, 2 devices | two branches, exact |" in (tmp_path / "speed.md").read_text()
