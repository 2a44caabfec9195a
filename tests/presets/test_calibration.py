"""``target_psnr`` takes the target error of a calibration, which is made from measured conditions."""

import pytest
import torch

from dit_accel import accelerate_pipeline
from dit_accel.presets import load_preset
from tests.tiny import tiny_output, tiny_pipeline

PAIRS = {"calibration": [[0.1, 40.0], [0.4, 30.0]]}


def test_the_largest_target_error_that_reaches_it_counts():
    """A later target error replaces it, so a preset that has a target PSNR can be changed like any other."""
    for target, bound in {30: 0.4, 30.5: 0.1, 12: 0.4, None: 0.15}.items():
        assert load_preset("balanced", **PAIRS, target_psnr=target).schedule.bound == bound
    preset = load_preset("balanced", **PAIRS, target_psnr=30)
    assert load_preset(preset, target_error=0.2).schedule.bound == 0.2
    assert load_preset(preset, target_psnr=40).schedule.bound == 0.1
    assert load_preset("turbo", schedule=preset.schedule.model_dump()).schedule.bound == 0.4
    later = load_preset(load_preset("balanced", computed_steps=5), target_error=0.2).schedule
    assert later.computed_steps is None and later.rule == "adaptive"


@pytest.mark.parametrize(
    ("keys", "stays"),
    [
        ({"forecast": {}}, True),
        ({"order": 2, "level": "output"}, True),
        ({"linear.dtype": None, "graphs": "never"}, True),
        ({"order": 1}, False),
        ({"linear.dtype": "int8"}, False),
    ],
    ids=str,
)
def test_a_calibration_stays_until_a_value_changes_the_result(keys, stays):
    """A section or key that is given with the value that it had changes nothing."""
    assert bool(load_preset("balanced", **keys).schedule.calibration) is stays
    assert load_preset("balanced", **keys, **PAIRS).schedule.calibration  # is for the given keys


def test_attention_in_8_bits_drops_the_calibration_of_the_same_preset():
    sparse = load_preset("balanced", **PAIRS, skip={"policy": "sparge", "steps": "all"})
    assert load_preset(sparse, kernels={"attention": "triton"}, tau_kv=0.15).schedule.calibration
    assert not load_preset(sparse, qk_dtype="int8").schedule.calibration


def test_a_run_decides_as_with_that_target_error_and_says_so():
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "balanced", **PAIRS, target_psnr=35)
    promised = tiny_output(pipe, "flux", steps=6)
    (note,) = pipe.dit_accel.report().notes
    assert note.startswith("target_psnr 35 dB: target_error 0.1, with which 90% of the prompts")
    accelerate_pipeline(pipe, "balanced", target_error=0.1)
    assert torch.equal(tiny_output(pipe, "flux", steps=6), promised) and not pipe.dit_accel.report().notes
