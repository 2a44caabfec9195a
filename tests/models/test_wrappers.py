"""A transformer in wrappers is accelerated, reported and restored as one without."""

import peft
import pytest
import torch
from torch import nn

from dit_accel import accelerate_pipeline, accelerate_transformer, report, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models import denoisers
from dit_accel.models.hooks import find_hook
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 8


class Wrapper(nn.Module):
    """Passes all arguments on, and everything else that the pipeline asks for."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def __getattr__(self, name):
        found = self._modules["inner"] if "_modules" in vars(self) else None
        return found if name == "inner" else getattr(found, name)


class NamesLatents(Wrapper):
    def forward(self, hidden_states, **kwargs):
        return self.inner(hidden_states, **kwargs)


class Unregistered:
    """No module, as ``QuantizedDiffusersModel`` of optimum-quanto."""

    def __init__(self, inner):
        self._wrapped = inner

    def __getattr__(self, name):
        return getattr(vars(self)["_wrapped"], name)

    def forward(self, *args, **kwargs):
        return self._wrapped.forward(*args, **kwargs)

    __call__ = forward


class InList(Wrapper):
    def __init__(self, inner):
        nn.Module.__init__(self)
        self.held = [inner]

    def forward(self, *args, **kwargs):
        return self.held[0](*args, **kwargs)

    def __getattr__(self, name):
        return getattr(vars(self)["held"][0], name)


def of_peft(transformer):
    config = peft.LoraConfig(target_modules=["to_q"], init_lora_weights=True)  # adds zeros
    return peft.get_peft_model(transformer, config)


WRAPPERS = {
    "module": Wrapper,
    "named latents": NamesLatents,
    "no module": Unregistered,
    "list": InList,
    "nested": lambda inner: Unregistered(Wrapper(inner)),
    "compiled inside": lambda inner: Wrapper(torch.compile(inner, backend="eager")),
    "peft": of_peft,
}


def call(pipe, name="flux"):
    return tiny_output(pipe, name, steps=STEPS)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_transformer_runs_as_one_without(wrapper):
    """Accelerated before or after: the bits and the report are the same, and restoring leaves nothing."""
    pipe, wrap = tiny_pipeline("flux"), WRAPPERS[wrapper]
    inner = pipe.transformer
    if wrapper == "peft":
        wrap(inner)  # the layers that it puts into the transformer
    plain, left = call(pipe), {*vars(inner), "peft_config", "_is_torch_compile"}  # of peft and torch.compile
    expected, modes = call(accelerate_pipeline(pipe, "turbo")), report(pipe).steps_by_mode

    def check():
        assert torch.equal(call(pipe), expected)
        assert report(pipe).steps_by_mode == modes and not any("in effect" in note for note in report(pipe).notes)
        assert "transformer" in pipe.dit_accel.report().parts
        restore_pipeline(pipe)
        assert find_hook(inner) is None and set(vars(inner)) <= left

    pipe.transformer = wrap(inner)
    check()
    accelerate_pipeline(pipe, "turbo")
    check()
    assert torch.equal(call(pipe), plain)


@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_families_and_branches_are_known_inside_of_a_wrapper(name):
    pipe = tiny_pipeline(name)
    expected = call(accelerate_pipeline(pipe, "turbo"), name)
    family = pipe.dit_accel.family
    restore_pipeline(pipe).transformer = Wrapper(pipe.transformer)
    assert torch.equal(call(accelerate_pipeline(pipe, "turbo"), name), expected)
    assert pipe.dit_accel.family == family != "any"


def test_a_wrapper_can_be_passed_instead_of_its_transformer(pipe):
    """To accelerate_transformer and report; two wrappers around one transformer have one acceleration."""
    expected = call(accelerate_pipeline(pipe))
    restore_pipeline(pipe).transformer = Wrapper(pipe.transformer)
    acceleration = accelerate_transformer(pipe.transformer)
    assert torch.equal(call(pipe), expected)
    assert report(pipe.transformer).steps_by_mode == report(Wrapper(pipe.transformer.inner)).steps_by_mode
    acceleration.restore()
    assert find_hook(pipe.transformer.inner) is None


class Both(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.models = nn.ModuleList(inner)

    def forward(self, *args, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda inner: Both(inner, tiny_pipeline("flux").transformer), "a wrapper must hold one transformer: call"),
        (lambda inner: Both(), "a wrapper must hold one transformer: call accelerate_pipeline before"),
        (lambda inner: torch.compile(Wrapper(inner)), "compile the FluxTransformer2DModel inside"),
    ],
    ids=["several", "none", "compiled outside"],
)
def test_a_wrapper_that_is_refused_names_the_way(pipe, wrap, message):
    pipe.transformer = wrap(pipe.transformer)
    with pytest.raises(UnsupportedError, match=message):
        accelerate_pipeline(pipe)
    assert not hasattr(pipe, "dit_accel")


def test_only_wrappers_are_looked_into(pipe):
    """Text encoders take any arguments too; a transformer's own submodules are no transformers of the pipeline."""
    assert denoisers(pipe) == {"transformer": pipe.transformer}
