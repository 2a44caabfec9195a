"""The check of CUDA graphs at toy size: every row, and a row that fails."""

import json
import sys

from scripts.checks import graphs as graphs_check


def rows(monkeypatch, file, *options):
    monkeypatch.setattr(sys, "argv", ["graphs_check", "--smoke", *options, "--output", str(file)])
    monkeypatch.setattr(graphs_check, "FAMILIES", ("flux",))
    code = graphs_check.main()
    return code, {row["check"]: row for row in json.loads(file.read_text())["rows"]}


def test_every_row_is_measured(monkeypatch, tmp_path):
    code, found = rows(monkeypatch, tmp_path / "graphs.json", "--models", "wan-1.3b")
    steps = [f"wan-1.3b, {what}" for what in graphs_check.DENSITIES]
    changes = [f"change of {name}" for name in list(graphs_check.situations.SITUATIONS)[:2]]
    assert code == 0 and list(found) == [*changes, "tiny flux", "wan-1.3b: build", *steps]
    assert found[steps[0]]["tile_density"] < found[steps[-1]]["tile_density"] == 1
    assert all(row["passed"] for row in found.values())


def test_a_row_that_fails_does_not_end_the_others(monkeypatch, tmp_path, capsys):
    def fails(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(graphs_check, "tiny_run", fails)
    code, found = rows(monkeypatch, tmp_path / "graphs.json", "--models", "wan-1.3b")
    assert code == 1 and found["tiny flux"]["error"] == "RuntimeError: no such kernel"
    assert found["wan-1.3b, exact"]["passed"]
    assert "Traceback" in capsys.readouterr().err
