"""The study of linear layers in 8 bits: a small run of it."""

import json
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import layers_in_8_bits  # noqa: E402


def test_presets_run_with_each_kind_of_layer(monkeypatch, tmp_path):
    """As they are `exact` gives the plain picture; int8 is nearer to it than float8."""
    stem = tmp_path / "layers"
    options = ["--models", "demo-flux", "--prompts", "1", "--steps", "4", "--device", "cpu", "--output", str(stem)]
    monkeypatch.setattr(sys, "argv", ["layers_in_8_bits", *options])
    layers_in_8_bits.main()
    rows = json.loads(stem.with_suffix(".json").read_text())["results"]
    assert [(row["preset"], row["linear_dtype"]) for row in rows] == [
        (preset, dtype) for preset in ("exact", "balanced") for dtype in (None, "int8", "float8")
    ]
    plain, int8, float8, *_ = (row["psnr_db"] for row in rows)
    assert plain > int8 > float8 > 20
    assert "| demo-flux | exact | as they are |" in stem.with_suffix(".md").read_text()
