"""The study of learned forecasts, at toy size."""

import json
import sys

import pytest
import torch

from scripts.research import learned_forecast
from scripts.research.learned_study import fits
from scripts.research.learned_study.closed_runs import MARK, is_learned
from scripts.research.learned_study.coordinates import COORDINATES, DEGREES
from scripts.research.learned_study.runs import packed_like, unpacked


def test_forecasts_and_closed_runs_are_compared(tmp_path, monkeypatch):
    """Every learned model has its ratios, a second call takes the rows over, and closed loops have work and PSNR."""
    options = ["--models", "demo-flux", "--steps", "8", "--size", "64", "--dtype", "float32", "--tested", "1"]
    stem = tmp_path / "found"
    monkeypatch.setattr(
        sys, "argv", ["learned_forecast.py", "--output", str(stem), *options, "--most", "1", "--rounds", "2"]
    )
    learned_forecast.main()
    rows = json.loads(stem.with_suffix(".json").read_text())["rows"]
    names = {f"{name}, {count}" for name in fits.MODELS for count in learned_forecast.FITTED}
    curves = {f"{name}, degree {degree}" for name in COORDINATES for degree in DEGREES}
    assert all(set(row["learned"]) == names | curves | {"network, 5"} for row in rows)
    assert {row["group"] for row in rows} == {"first", "dense", "steady", "corrected", "corrected, first"}
    closed = [*options, "--closed", "8", "--targets", "1.0", "--rows", str(stem.with_suffix(".json"))]
    monkeypatch.setattr(sys, "argv", ["learned_forecast.py", "--output", str(tmp_path / "closed"), *closed])
    learned_forecast.main()
    found = json.loads((tmp_path / "closed.json").read_text())
    assert found["rows"] == []
    assert {row["series"] for row in found["closed"]} >= {"loop", "forecasts", "corrections", "both"}
    assert all(0 < row["computed"] < 1 and len(row["psnr"]) == 1 for row in found["closed"])


@pytest.mark.parametrize("name", fits.MODELS)
def test_models_find_an_exact_law(name):
    """An output of 3 times the newest record minus the slope is forecast to float32 rounding, on new samples."""
    generator = torch.Generator().manual_seed(0)
    values = {feature: torch.randn(12, 2, 1, 8, 8, generator=generator) for feature in (*fits.RECORDS, "latents")}
    found = values | {"polynomial": values["output"] + values["slope"]}
    right = 3 * values["output"] - values["slope"]
    known, new = ({key: value[part] for key, value in found.items()} for part in (slice(8), slice(8, None)))
    model = fits.MODELS[name]
    weights = fits.ridge(model.columns(known), model.targets((right - found["polynomial"])[:8]), [0.0])
    torch.testing.assert_close(model.forecast(new, weights)[0], right[8:], atol=1e-3, rtol=0)


def test_packing_is_undone():
    tokens = torch.randn(2, 16, 64)
    assert torch.equal(packed_like(unpacked(tokens), tokens), tokens)


def test_learned_degrees_are_marked():
    assert all(is_learned(degree - MARK) for degree in (0, 1, 2))
    assert not any(is_learned(degree) for degree in (0, 0.5, 1, 1.6, 2, 2.0**-20))
