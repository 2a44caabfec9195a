"""The loop with knobs, as it is, is the package's."""

import sys
from pathlib import Path

import pytest
import torch

from dit_accel import accelerated, load_preset
from dit_accel.tools.testing import tiny_output, tiny_pipeline

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from loop_study.loop import Predictor, Variant, looped
from loop_variants import gains, variants


@pytest.mark.parametrize(
    "error_in, damping, beyond", [("output", False, 0.5), ("latents", False, 0.0), ("latents", True, 0.0)]
)
def test_loop_as_it_is_is_the_packages(error_in, damping, beyond):
    """The same steps computed, and the same latents."""
    pipe = tiny_pipeline("flux")
    changes = {"schedule.error_in": error_in, "schedule.target_error": 0.1, "forecast.damping": damping}
    changes["forecast.beyond"] = beyond
    preset = load_preset("any-balanced", **changes)
    predictors = (*Variant(0.1).predictors, *([Predictor(1, damped=True)] if damping else []))
    with accelerated(pipe, preset):
        expected = tiny_output(pipe, "flux", steps=20)
        computed = [step.index for step in pipe.dit_accel.report().steps if step.mode != "dispatch"]
    with looped(pipe, Variant(0.1, error_in, predictors=predictors, beyond=beyond)) as loop:
        latents = tiny_output(pipe, "flux", steps=20)
    assert 4 < len(computed) < 16
    assert loop.computed == computed
    torch.testing.assert_close(latents, expected, rtol=1e-3, atol=1e-4)


def test_every_variant_runs():
    """On a tiny model, and each knob changes what comes out or which steps are computed."""
    pipe = tiny_pipeline("flux")
    seen = {}
    for name, variant in variants("demo-flux").items():
        with looped(pipe, variant) as loop:
            seen[name] = tiny_output(pipe, "flux", steps=20)
        assert seen[name].isfinite().all(), name
        assert loop.fraction < 1.0
    assert vars(pipe.transformer).get("forward") is None


def test_gains_are_over_the_loop_at_equal_work():
    """Interpolated between its settings; what lies beyond them has no rival."""

    def row(name, fraction, decibels):
        return {"name": name, "computed_fraction": fraction, "psnr_db": decibels, "worst_db": decibels - 5}

    results = [row("as it is", 0.2, 40.0), row("as it is", 0.4, 60.0), row("idea", 0.3, 53.0), row("idea", 0.5, 99.0)]
    assert gains(results)["idea"] == {"mean_db": pytest.approx(3.0), "worst_db": pytest.approx(3.0)}
