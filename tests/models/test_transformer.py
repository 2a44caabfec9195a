"""Features of an accelerated transformer that callers need: gradients, both forms of output, float64."""

import pytest
import torch

from dit_accel import accelerate_pipeline, accelerate_transformer, load_preset, restore_pipeline
from dit_accel.models.session import GRADIENTS
from tests.levels import HEADS, LAYERS
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 8
SPARGE = {"policy": "sparge", "steps": "all"}
PRESETS = {
    "output": ("flux", load_preset("turbo")),
    "layer": ("flux", LAYERS),
    "head": ("flux", HEADS),
    "layer-by-facts": ("sd3", load_preset("turbo", level="layer")),
    "tiles": ("sd3", load_preset("turbo", skip=SPARGE | {"tau_kv": 0.3})),
    "token-order": ("wan", load_preset("video-turbo", model="wan", skip=SPARGE, blocks={"token_order": "hilbert"})),
}
every_preset = pytest.mark.parametrize("name, preset", PRESETS.values(), ids=PRESETS)
every_place = pytest.mark.parametrize("name, preset", [PRESETS[item] for item in ("output", "head", "tiles")])


def recorded_calls(pipe, name):
    """The arguments of the transformer's calls in one run of a plain pipeline."""
    calls = []
    handle = pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    tiny_output(pipe, name, steps=STEPS)
    handle.remove()
    return calls


def gradients(pipe, call):
    """Gradients of the sum of a call's output with respect to every parameter, by name."""
    pipe.transformer.zero_grad()
    pipe.transformer(**{**call, "return_dict": False})[0].sum().backward()
    return {name: parameter.grad for name, parameter in pipe.transformer.named_parameters()}


@every_place
def test_gradients_are_those_of_the_plain_transformer(name, preset):
    """Steps that would be forecast or skip tiles run plainly; the report and a warning say so."""
    pipe = tiny_pipeline(name)
    steps = recorded_calls(pipe, name)
    expected = [gradients(pipe, call) for call in steps]
    accelerate_pipeline(pipe, preset)
    tiny_output(pipe, name, steps=STEPS)
    assert pipe.dit_accel.report().computed_fraction < 1
    for call, plain in zip(steps, expected, strict=True):
        with pytest.warns(UserWarning, match="require gradients run unaccelerated"):
            arguments = gradients(pipe, call)
        assert all(torch.equal(arguments[item], plain[item]) for item in plain if plain[item] is not None)
        assert [key for key in arguments if arguments[key] is None] == [key for key in plain if plain[key] is None]
    assert pipe.dit_accel.report().notes[-1] == GRADIENTS
    tiny_output(pipe, name, steps=STEPS)
    report = pipe.dit_accel.report()
    assert report.computed_fraction < 1 and GRADIENTS not in report.notes


def test_gradients_of_inputs_alone(pipe):
    """A frozen transformer has them too; if no gradient is needed the loop continues as under no_grad."""
    calls = recorded_calls(pipe, "flux")
    pipe.transformer.requires_grad_(False)
    accelerate_transformer(pipe.transformer, "turbo", [call["timestep"] for call in calls])

    def loop(wanted):
        for call in calls:
            x = call["hidden_states"].clone().requires_grad_(wanted)
            assert pipe.transformer(**{**call, "hidden_states": x})[0].requires_grad == wanted
        return pipe.transformer._diffusers_hook.hooks["dit_accel"].acceleration.report()

    assert loop(False).steps_by_mode["dispatch"] > 0
    with pytest.warns(UserWarning, match=r"put them under torch\.no_grad\(\)"):
        assert loop(True).steps_by_mode == {"full": STEPS}


@every_place
def test_some_steps_under_gradients(name, preset):
    """They run plainly, earlier records are dropped, and the following steps are accelerated again."""
    pipe = tiny_pipeline(name)
    plain = tiny_output(pipe, name, steps=24)
    accelerate_pipeline(pipe, preset)
    hook = pipe.transformer._diffusers_hook.hooks["dit_accel"]

    def differentiate(pipe, step, timestep, tensors):
        torch.set_grad_enabled(step + 1 in (8, 9))
        return {key: value.detach() for key, value in tensors.items()}

    try:
        with torch.no_grad(), pytest.warns(UserWarning, match="run unaccelerated"):
            output = tiny_output(pipe, name, steps=24, callback_on_step_end=differentiate)
    finally:
        torch.set_grad_enabled(True)
    report = hook.acceleration.report()
    assert len(report.steps) == 24 and {report.steps[step].mode for step in (8, 9)} == {"full"}
    assert "dispatch" in {step.mode for step in report.steps[12:]} or report.computed_fraction < 1
    assert float((output - plain).norm() / plain.norm()) < 0.2


@pytest.mark.parametrize("level", ["output", "layer", "head"])
def test_either_form_of_output_in_any_call(level):
    """return_dict may differ from call to call, also where a forecast step follows on one of the other form."""
    name, preset = PRESETS[level]
    pipe = tiny_pipeline(name)
    calls = recorded_calls(pipe, name)
    acceleration = accelerate_transformer(pipe.transformer, preset, [call["timestep"] for call in calls])
    with torch.no_grad():
        for step, call in enumerate(calls):
            wants_tuple = step >= STEPS // 2 and step % 4 < 2
            output = pipe.transformer(**{**call, "return_dict": not wants_tuple})
            assert isinstance(output, tuple) == wants_tuple and output[0].shape == call["hidden_states"].shape
    assert "dispatch" in acceleration.report().steps_by_mode


@every_preset
@pytest.mark.filterwarnings("ignore:.*should be kept in float32")
def test_float64(name, preset):
    """Forecasts run in float64, and fused kernels are replaced by the plain path, as the report says."""
    pipe = tiny_pipeline(name).to(torch.float64)
    plain = tiny_output(pipe, name, steps=STEPS)
    accelerate_pipeline(pipe, preset)
    output = tiny_output(pipe, name, steps=STEPS)
    assert output.dtype == plain.dtype and float((output - plain).norm() / plain.norm()) < 0.05
    report = pipe.dit_accel.report()
    assert report.computed_fraction < 1 or "float64" in str(report)
    assert torch.equal(tiny_output(restore_pipeline(pipe), name, steps=STEPS), plain)
