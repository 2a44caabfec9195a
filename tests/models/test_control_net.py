"""Control nets run only in steps whose transformer reads their outputs."""

import diffusers
import pytest
import torch

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.models.beside.control_net import (
    DeferredCall,
    DeferredTensor,
    TensorForm,
    computed,
    control_net,
    watch_net,
)
from dit_accel.models.hooks import find_hook
from tests.tiny import flux, tiny_output, tiny_pipeline
from tests.tiny.inputs import random_tensor

STEPS = 8
OUTPUT = {"schedule": {"warmup": 2, "interval": 3, "cooldown": 1}}


def counted(net):
    """Number of times the net's own layers have run, in a list of one."""
    calls = [0]
    net.x_embedder.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return calls


@pytest.fixture
def pipe():
    return tiny_pipeline("flux-controlnet")


def test_a_forecast_step_runs_no_control_net(pipe):
    """The output is bit for bit the same as with the net running in every step."""
    calls = counted(pipe.controlnet)
    accelerate_pipeline(pipe, load_preset("exact", **OUTPUT))
    result = tiny_output(pipe, "flux-controlnet", steps=STEPS)
    assert calls[0] == STEPS - pipe.dit_accel.report().steps_by_mode["dispatch"] < STEPS

    pipe.controlnet._hf_hook = object()  # as where it is offloaded: it can't wait
    calls[0] = 0
    assert torch.equal(tiny_output(pipe, "flux-controlnet", steps=STEPS), result) and calls[0] == STEPS
    del pipe.controlnet._hf_hook


def several_of_flux(pipe):
    """Two nets, which diffusers puts into one module."""
    other = tiny_pipeline("flux-controlnet", seed=1).controlnet
    return diffusers.FluxControlNetPipeline, [pipe.controlnet, other], diffusers.FluxMultiControlNetModel, {}


def union_of_flux(pipe):
    """One net for several kinds of images, which are named in the call, and twice in the module."""
    net = diffusers.FluxControlNetModel.from_config({**pipe.controlnet.config, "num_mode": 3}).eval()
    net.load_state_dict(pipe.controlnet.state_dict(), strict=False)  # all but the kinds' embeddings
    return diffusers.FluxControlNetPipeline, [net, net], diffusers.FluxMultiControlNetModel, {"control_mode": [0, 2]}


def several_of_sd3(pipe):
    nets = [diffusers.SD3ControlNetModel.from_transformer(pipe.transformer, 1, 0).eval() for _ in range(2)]
    with torch.no_grad():
        for layer in (layer for net in nets for layer in net.controlnet_blocks):  # which begin as zeros
            layer.weight.copy_(0.2 * torch.eye(*layer.weight.shape))
    return diffusers.StableDiffusion3ControlNetPipeline, nets, diffusers.SD3MultiControlNetModel, {}


@pytest.mark.parametrize(
    ("name", "make"),
    [("flux-controlnet", several_of_flux), ("flux-controlnet", union_of_flux), ("sd3", several_of_sd3)],
    ids=["flux-several", "flux-union", "sd3-several"],
)
def test_several_and_union_nets_run_in_computed_steps_only(name, make):
    base = tiny_pipeline(name)
    kind, nets, together, named = make(base)
    pipe = kind(**{**base.components, "controlnet": together(nets)})
    pipe.set_progress_bar_config(disable=True)
    calls, of_a_step = [], nets.count(nets[-1])
    nets[-1].transformer_blocks[0].register_forward_hook(lambda *_: calls.append(1))
    picture = random_tensor(torch.Generator().manual_seed(9), flux.HEIGHT, flux.WIDTH)
    scales = {"control_image": [picture, 1 - picture], "controlnet_conditioning_scale": [0.5, 0.8]}

    def run():
        calls.clear()
        torch.manual_seed(0)  # Stable Diffusion 3 encodes the images with noise without a generator
        return tiny_output(pipe, name, steps=STEPS, **scales, **named)

    plain = run()
    assert len(calls) == of_a_step * STEPS
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(run(), plain)
    accelerate_pipeline(pipe, "exact", **OUTPUT)
    assert 0 < float((run() - plain).norm() / plain.norm()) < 0.1
    assert len(calls) == of_a_step * (STEPS - pipe.dit_accel.report().steps_by_mode["dispatch"]) < of_a_step * STEPS
    assert torch.equal(restore_pipeline(pipe) and run(), plain)


def test_restoring_leaves_the_net_as_it_was(pipe):
    plain, calls = tiny_output(pipe, "flux-controlnet", steps=2), counted(pipe.controlnet)
    for _ in range(2):  # over an earlier acceleration too
        accelerate_pipeline(pipe, "exact")
    assert torch.equal(tiny_output(pipe, "flux-controlnet", steps=2), plain)
    stop = watch_net(pipe.controlnet, defers=True)  # of another pipeline
    later = find_hook(pipe.controlnet)
    restore_pipeline(pipe)
    assert find_hook(pipe.controlnet) is later
    stop()
    assert not hasattr(pipe.controlnet, "_diffusers_hook") and "forward" not in vars(pipe.controlnet)
    calls[0] = 0
    assert torch.equal(tiny_output(pipe, "flux-controlnet", steps=2), plain) and calls[0] == 2


def test_another_size_is_another_form(pipe):
    """A call with other shapes than the previous one determines its own form first."""
    sizes = [{"height": 64, "width": 48}, {"height": 96, "width": 64}]
    plain = [tiny_output(pipe, "flux-controlnet", steps=3, **size) for size in sizes]
    accelerate_pipeline(pipe, "exact")
    for size, expected in zip(sizes * 2, plain * 2, strict=True):
        assert torch.equal(tiny_output(pipe, "flux-controlnet", steps=3, **size), expected)


def test_reading_makes_the_call_once():
    """Any operation on a deferred tensor runs on the call's output."""
    runs, value = [], torch.arange(6.0).view(2, 3)
    call = DeferredCall(lambda: runs.append(1) or (value, [value + 1]))
    first, second = (DeferredTensor(call, index, TensorForm.of(value)) for index in range(2))
    assert first.shape == (2, 3) and first.dtype == torch.float32 and not runs
    assert torch.equal(first + second, 2 * value + 1) and torch.equal(second[1], value[1] + 1)
    nested = computed({"a": [first, None], "b": 2})
    assert nested["a"][0] is value and nested["b"] == 2
    assert runs == [1]


def deferred(value):
    """A deferred tensor, and how often its call was made."""
    runs = []
    call = DeferredCall(lambda: runs.append(1) or value)
    return DeferredTensor(call, 0, TensorForm.of(value)), runs


@pytest.mark.parametrize(
    "part",
    [lambda x: x[:, 2:], lambda x: x[:, 1:6:2], lambda x: x[1:, 1:][:, 1:], lambda x: x[:, :99]],
    ids=["from", "step", "twice", "beyond"],
)
def test_a_part_is_cut_off_without_the_call(part):
    """Slicing, as pipelines drop reference tokens, gives form and values of that part with one call."""
    value = torch.arange(48.0).view(2, 8, 3)
    whole, runs = deferred(value)
    cut = part(whole)
    assert isinstance(cut, DeferredTensor) and cut.shape == part(value).shape and cut.dtype == value.dtype
    assert runs == []
    assert torch.equal(cut + 0, part(value)) and torch.equal(whole + 0, value) and runs == [1]


def test_a_call_that_is_read_where_gradients_count_has_none():
    """The call was deferred without gradients."""
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        form = TensorForm.of(layer(torch.ones(1, 2)))
    call = DeferredCall(lambda: layer(torch.ones(1, 2)))
    with torch.enable_grad():
        assert not computed(DeferredTensor(call, 0, form)).requires_grad


class Net(torch.nn.Module):
    """Gives parts of its input, as flags and other arguments say."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, scale=1.0, both=False, more=None):
        self.calls += 1
        produced = [x * scale, None, x.sum(1)] if both else [x * scale, None]
        return {"parts": produced, "name": "net", "more": more}


FIRST = {"x": torch.ones(2, 3), "scale": 0.5, "both": False}


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"x": torch.zeros(2, 3), "scale": 0.25}, True),
        ({"x": torch.ones(3, 2).T}, True),
        ({"both": True}, False),
        ({"x": torch.ones(2, 4)}, False),
        ({"x": torch.ones(2, 3, dtype=torch.float64)}, False),
        ({"x": torch.ones(2, 3, device="meta")}, False),
        ({"scale": 1}, False),
        ({"more": [1]}, False),
    ],
    ids=["same", "values", "strides", "flag", "shape", "dtype", "device", "kind", "list"],
)
def test_a_call_waits_where_the_form_of_its_output_is_known(changes, waits):
    """The previous call differed only in values, so the form is known; the output equals an immediate call's."""
    net, alone = Net(), Net()
    watch_net(net, defers=True)
    net(**FIRST)
    assert net.calls == 1, "the first tells the form"
    arguments = FIRST | changes
    output, expected = net(**arguments), alone(**arguments)
    assert net.calls == (1 if waits else 2)
    assert output["name"] == "net" and output["parts"][1] is None and len(output["parts"]) == len(expected["parts"])
    for produced, original in zip(output["parts"], expected["parts"], strict=True):
        assert original is None or TensorForm.of(produced) == TensorForm.of(original)
        assert original is None or original.is_meta or torch.equal(produced + 0, original)
    if not waits:
        assert isinstance(net(**arguments)["parts"][0], DeferredTensor), "its form is the known one now"


@pytest.mark.parametrize("why", ["gradients", "offload", "hook", "cpu", "cuda", "compiled"])
def test_a_call_that_could_not_be_made_later_is_made_at_once(monkeypatch, why):
    """Gradients would be lost, weights may have moved, another hook or autocast be gone, and compilers see calls."""
    net = Net()
    watch_net(net, defers=True)
    with torch.no_grad():
        net(**FIRST)
    if why == "offload":
        net._hf_hook = object()
    if why == "hook":
        net._diffusers_hook.register_hook(diffusers.hooks.ModelHook(), "another")
    if why == "compiled":
        monkeypatch.setattr("dit_accel.models.beside.control_net.is_compiled", lambda module: module is net)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == why)
    with torch.set_grad_enabled(why == "gradients"):
        output = net(**FIRST)
    assert net.calls == 2 and not isinstance(output["parts"][0], DeferredTensor)


def test_only_a_net_of_a_pipeline_is_deferred(pipe):
    """Components of that name may be of any kind, or missing."""
    assert control_net(pipe) is pipe.controlnet
    for other in (object(), None, type("Pipe", (), {"controlnet": None})(), type("Pipe", (), {"controlnet": [1]})()):
        assert control_net(other) is None
