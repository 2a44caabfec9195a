"""The study of layers and attention in 8 bits: a small run of it."""

import json
import sys

from scripts.research import layers_in_8_bits


def test_presets_run_in_each_kind_of_8_bits(monkeypatch, tmp_path):
    """Without 8 bits `exact` gives the plain image; int8 is nearer to it than float8."""
    stem = tmp_path / "layers"
    options = ["--models", "demo-flux", "--prompts", "1", "--steps", "4", "--device", "cpu", "--output", str(stem)]
    monkeypatch.setattr(sys, "argv", ["layers_in_8_bits", *options])
    own = layers_in_8_bits.demo_arguments
    monkeypatch.setattr(layers_in_8_bits, "demo_arguments", lambda folder: own(folder) | {"height": 128, "width": 128})
    layers_in_8_bits.main()
    rows = json.loads(stem.with_suffix(".json").read_text())["results"]
    cases = ["nothing", "layers, int8", "layers, float8", "attention, int8", "attention, int8+fp8"]
    assert [(row["preset"], row["in_8_bits"]) for row in rows] == [
        (preset, case) for preset in ("exact", "balanced") for case in cases
    ]
    plain, *others = (row["psnr_db"] for row in rows[:5])
    int8, float8, attention_int8, attention_fp8 = others
    assert plain > int8 > float8 > 20
    assert plain > attention_int8 > attention_fp8 > 20
    assert "| demo-flux | exact | nothing |" in stem.with_suffix(".md").read_text()
