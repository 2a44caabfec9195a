"""The study of weights stored in 8 and 4 bits: a small run of it."""

import json
import sys

from scripts.research import stored_weights


def test_forms_lose_more_the_fewer_bits_they_have(monkeypatch, tmp_path):
    """Unchanged weights give the plain image; those of the loop alone are compared with their own plain run."""
    stem = tmp_path / "weights"
    options = ["--model", "demo-flux", "--prompts", "1", "--steps", "4", "--device", "cpu", "--output", str(stem)]
    monkeypatch.setattr(sys, "argv", ["stored_weights", *options, "--weights", "bf16,int8,q4"])
    arguments_of = stored_weights.demo_arguments
    monkeypatch.setattr(
        stored_weights, "demo_arguments", lambda folder: arguments_of(folder) | {"height": 128, "width": 128}
    )
    stored_weights.main()
    bf16, *others = json.loads(stem.with_suffix(".json").read_text())["results"]
    assert bf16["weights_db"] == [stored_weights.IDENTICAL]
    assert bf16["loop_db"] == bf16["both_db"]
    assert [row["weights"] for row in others] == ["int8", "q4"]
    int8, q4 = (row["weights_db"][0] for row in others)
    assert bf16["weights_db"][0] > int8 > q4 > 15
    assert "| demo-flux | q4 |" in stem.with_suffix(".md").read_text()
