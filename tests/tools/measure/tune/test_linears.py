"""The linear layers that a tuning excludes from 8 bits: those with the largest errors."""

import pytest

from dit_accel import accelerate_pipeline, load_preset
from dit_accel.presets import Linear
from dit_accel.tools.measure.tune import tune
from dit_accel.tools.measure.tune.linears import Kind, LinearTap, excluded, work_left
from tests.tiny import tiny_output

KINDS = [Kind("a.*", 0.03, 0.5), Kind("b.*", 0.01, 0.25), Kind("c.*", 0.005, 0.25)]


def test_kinds_under_the_bound_run_in_8_bits():
    for bound, patterns, work in ((0.0, ["a.*", "b.*", "c.*"], 1.0), (0.01, ["a.*"], 0.75), (1.0, [], 0.5)):
        assert excluded(KINDS, bound) == patterns and work_left(KINDS, bound) == work


def test_kinds_are_measured_on_a_plain_run(pipe):
    """Each error is the layer's own, patterns are valid in a preset, and no hook stays."""
    tap = LinearTap(pipe, Linear(dtype="int8", exclude=["*.to_k"]))
    with tap.measuring():
        tiny_output(pipe, "flux", steps=2)
    kinds = tap.kinds()
    assert not any(module._forward_hooks for module in pipe.transformer.modules())
    assert [kind.error for kind in kinds] == sorted((kind.error for kind in kinds), reverse=True)
    assert all(0 < kind.error < 0.05 for kind in kinds)
    assert sum(kind.share for kind in kinds) == pytest.approx(1)
    patterns = [kind.pattern for kind in kinds]
    assert "transformer_blocks.*.ff.net.2" in patterns and not any(name.endswith(".to_k") for name in patterns)
    accelerate_pipeline(pipe, "exact", linear={"dtype": "int8", "exclude": patterns[1:]})


def test_a_tuning_excludes_what_its_target_does_not_bear(pipe):
    """A loose target allows all layers in 8 bits, a strict one some or none; the cost counts layers in 8 bits."""
    call = {"num_inference_steps": 3, "height": 32, "width": 32, "guidance_scale": 3.5}
    request = {"prompts": ["a fox", "a hill"], "arguments": call, "evaluations": 8}
    exact = load_preset("exact", linear={"dtype": "int8"})
    loose = tune(pipe, exact, target_error=0.5, **request)
    assert loose.met and loose.preset.linear == Linear(dtype="int8", exclude=[])
    error = loose.held_out[0].latent_error
    close = tune(pipe, exact, target_error=0.8 * error, **request)
    assert close.preset.linear.exclude or close.preset.linear.dtype is None
