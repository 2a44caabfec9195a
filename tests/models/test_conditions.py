"""A change of a run's conditioning is computed and named in the report; equal tensors are no change."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload

from dit_accel import accelerate_pipeline
from dit_accel.models.beside.control_net import hook_of
from dit_accel.models.conditions import Conditions
from tests.parallel_ranks import modes_of
from tests.test_changes_under_way import CHANGES
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 12


@pytest.mark.parametrize("when", ["begins", "ends"])
def test_a_control_net_that_begins_or_ends(when):
    """The steps in which its strength changes are computed."""
    pipe = accelerate_pipeline(tiny_pipeline("flux-controlnet"), "turbo")
    tiny_output(pipe, "flux-controlnet", steps=STEPS)
    changed_step = modes_of(pipe).index("dispatch", 4)
    window = {"begins": "control_guidance_start", "ends": "control_guidance_end"}[when]
    tiny_output(pipe, "flux-controlnet", steps=STEPS, **{window: changed_step / STEPS})
    assert modes_of(pipe)[changed_step] != "dispatch"
    noted = f"conditioning_scale of the ControlNet changed at step {changed_step}: caches dropped"
    assert noted in pipe.dit_accel.report().notes


def test_equal_tensors_made_anew_are_no_change():
    """A pipeline that creates its prompt embeddings in each step computes the same steps as with constant ones."""
    pipe = accelerate_pipeline(tiny_pipeline("wan"), "turbo")

    def run(callback):
        asked = ["latents", "prompt_embeds"]
        arguments = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": asked}
        return tiny_output(pipe, "wan", steps=STEPS, **arguments), modes_of(pipe)

    latents, expected = run(lambda pipe, step, timestep, tensors: tensors)
    anew, found = run(lambda pipe, step, timestep, tensors: {key: item.clone() for key, item in tensors.items()})
    assert found == expected and "dispatch" in found
    assert torch.equal(anew, latents)
    assert not [note for note in pipe.dit_accel.report().notes if "dropped" in note]


@pytest.mark.parametrize("device, is_change", [("cpu", True), ("meta", False)])
def test_a_replaced_weight_is_a_change_unless_it_is_offloaded(device, is_change):
    """Sequential offload keeps weights on the device meta between calls, as a new parameter after each."""
    layer = torch.nn.Linear(2, 2, device=device)
    conditions = Conditions(layer)
    before, weight = conditions.of({}, None, None), layer.weight
    layer.weight = torch.nn.Parameter(torch.empty_like(weight))
    assert (conditions.of({}, None, None) != before) is is_change


def test_weights_that_are_offloaded_while_a_call_runs_are_no_change():
    """Sequential offload recreates a transformer's weights before our hook reads them."""

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.conditions = Conditions(self)

        def forward(self, x):
            return self.conditions.of({}, None, None)

    model = cpu_offload(Reading(), execution_device=torch.device("cpu"))
    assert model(torch.ones(2)) == model(torch.ones(2))


def test_scales_of_a_pipeline_and_of_its_guider_are_conditions():
    """Numbers alone: a guider's other attributes, and its steps, are none."""
    guider = SimpleNamespace(guidance_scale=3.0, _skip_layer_guidance_scale=2, start=0.1, guidance_rescale="none")
    items = Conditions(torch.nn.Linear(2, 2)).of({}, SimpleNamespace(_guidance_scale=5.0, guider=guider), None)
    assert {name: value for name, value in items.items() if "of Simple" in name} == {
        "guidance_scale of SimpleNamespace": 3.0,
        "skip_layer_guidance_scale of SimpleNamespace": 2,
    }


def test_an_adapter_that_is_loaded_under_way_is_noticed_and_then_read(pipe):
    """Its strength is one of the conditions from then on."""
    conditions = Conditions(pipe.transformer)
    found = [conditions.of({}, None, None)["adapters"]]
    CHANGES["adapter-scale"].prepare(pipe)
    found.append(conditions.of({}, None, None)["adapters"])
    [layer, *_] = [item for item in pipe.transformer.modules() if hasattr(item, "merged_adapters")]
    layer.scaling = {name: 0.5 * strength for name, strength in layer.scaling.items()}
    found.append(conditions.of({}, None, None)["adapters"])
    assert len(set(found)) == 3


def test_a_strength_in_a_tensor_is_noticed(pipe):
    """Adapters that are made ready to be swapped under a compiled model have their strengths in tensors."""
    CHANGES["adapter-scale"].prepare(pipe)
    CHANGES["adapter-scale"].begin(pipe)
    layers = [item for item in pipe.transformer.modules() if hasattr(item, "merged_adapters")]
    for layer in layers:
        layer.scaling["one"] = torch.tensor(layer.scaling["one"])
    conditions = Conditions(pipe.transformer)
    before = conditions.of({}, None, None)
    assert conditions.of({}, None, None) == before
    layers[-1].scaling["one"].fill_(0.5)
    assert conditions.of({}, None, None)["adapters"] != before["adapters"]


def test_a_module_that_was_replaced_between_runs_counts():
    """A write to its weights in mid-run is noticed, and the module before is not kept alive."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "turbo")
    tiny_output(pipe, "flux", steps=4)
    earlier = weakref.ref(pipe.transformer.proj_out.weight)
    pipe.transformer.proj_out = copy.deepcopy(pipe.transformer.proj_out)
    gc.collect()
    assert earlier() is None

    def callback(pipe, step, timestep, tensors):
        if step == 3:
            with torch.no_grad():
                pipe.transformer.proj_out.weight.mul_(1.5)
        return tensors

    tiny_output(pipe, "flux", steps=8, callback_on_step_end=callback)
    assert "weights changed at step 4: caches dropped" in pipe.dit_accel.report().notes


def test_a_finished_run_keeps_no_arguments_of_its_control_net():
    pipe, kept = accelerate_pipeline(tiny_pipeline("flux-controlnet"), "turbo"), []

    def callback(pipe, step, timestep, tensors):
        kept.append(set(hook_of(pipe.controlnet).arguments))
        return tensors

    tiny_output(pipe, "flux-controlnet", steps=4, callback_on_step_end=callback)
    assert all("controlnet_cond" in names for names in kept)
    assert not hook_of(pipe.controlnet).arguments
