"""Hooks stay in effect, and are removed without a trace, in any combination with diffusers' own hooks."""

import copy
import functools
import io
import itertools
import pickle
from functools import partial

import pytest
import torch
from accelerate.hooks import ModelHook as OffloadHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models import dtype_argument
from dit_accel.models.hooks import HOOK_NAME, Hook, find_hook, hooks_above, register_hook, remove_hook, split_above
from tests.levels import LAYERS
from tests.pairs import every_pair
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_flux_lora, tiny_output, tiny_pipeline

STEPS = 10
SPARGE = {"policy": "sparge", "steps": "all", "tau_kv": 0.6}
LEVELS = {"output": load_preset("turbo"), "layer": LAYERS, "tiles": load_preset("turbo", skip=SPARGE)}


class Named:
    """A hook that adds its name to the list that a forward returns."""

    def __init__(self, name):
        super().__init__()
        self.name = name


class Around(Named, ModelHook):
    def new_forward(self, module, *args):
        return [*self.fn_ref.original_forward(*args), self.name]


class Behind(Named, ModelHook):
    def post_forward(self, module, output):
        return [*output, self.name]


class Ours(Around, Hook):
    pass


class Plain(nn.Module):
    def forward(self):
        return []


def hooked(kinds):
    """A module under hooks of these kinds, by name."""
    module = Plain()
    for name, kind in kinds.items():
        if kind is Ours:
            register_hook(module, kind(name), name)
        else:
            HookRegistry.check_if_exists_or_initialize(module).register_hook(kind(name), name)
    return module


@every_pair(order=itertools.permutations(["before", "around", "after"]), called=(True, False), kind=(Around, Behind))
def test_what_is_left_runs_whatever_goes_first(order, called, kind):
    """diffusers takes its hooks off in any order, called in between or not, and ours goes at any time."""
    for goes_after in range(len(order) + 1):
        module = hooked({"before": kind, "around": Around, "ours": Ours, "after": kind})
        left = ["before", "around", "ours", "after"]
        for name in order[:goes_after]:
            module._diffusers_hook.remove_hook(name, recurse=False)
            left.remove(name)
            assert not called or module.forward() == left
        assert module.forward() == left
        remove_hook(module, "ours")
        left.remove("ours")
        assert module.forward() == left


def test_a_hook_of_ours_that_is_put_on_or_taken_off_mends_the_others():
    """diffusers' own hook is cut off where ours was beneath it, or where another one was."""
    module = hooked({"ours": Ours, "around": Around})
    remove_hook(module, "ours")
    assert module.forward() == ["around"]
    module._diffusers_hook.remove_hook("around", recurse=False)
    assert module.forward() == []

    module = hooked({"before": Behind, "around": Around})
    module._diffusers_hook.remove_hook("before", recurse=False)
    register_hook(module, Ours("ours"), "ours")
    assert module.forward() == ["around", "ours"]


def test_a_hook_that_another_thread_is_removing_breaks_no_call():
    """diffusers drops the hook before its name."""
    module = hooked({HOOK_NAME: Ours, "around": Around, "behind": Behind})
    del module._diffusers_hook.hooks["around"]
    assert [*hooks_above(module)] == ["around", "behind"] and split_above(module) is None


@pytest.mark.parametrize("level", LEVELS)
def test_group_offload_and_a_lora_leave_the_acceleration_in_effect(level, pipe):
    """diffusers removes offload hooks from beneath ours and adds them again when a LoRA is loaded."""
    expected = accelerate_pipeline(_with_lora(tiny_pipeline("flux")), LEVELS[level])
    pipe.transformer.enable_group_offload(torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    accelerate_pipeline(pipe, LEVELS[level])
    tiny_output(pipe, "flux", steps=5)
    _with_lora(pipe)
    assert equal_up_to_rounding(tiny_output(pipe, "flux", steps=STEPS), tiny_output(expected, "flux", steps=STEPS))
    report, expected_report = pipe.dit_accel.report(), expected.dit_accel.report()
    assert report.computed_fraction == expected_report.computed_fraction < 1
    assert len(report.steps) == STEPS and report.fallbacks == expected_report.fallbacks
    plain = tiny_output(restore_pipeline(expected), "flux", steps=2)
    assert equal_up_to_rounding(tiny_output(restore_pipeline(pipe), "flux", steps=2), plain)


def test_every_transformer_and_block_that_was_touched_is_restored():
    pipe, other = tiny_pipeline("wan"), tiny_pipeline("wan", seed=1)
    first, block = pipe.transformer, pipe.transformer.blocks[0]
    skip, blocks = {"policy": "sparge", "steps": "all"}, {"token_order": "hilbert"}
    preset = load_preset("video-turbo", model="wan", skip=skip, blocks=blocks)
    attributes = {name: set(vars(module)) for name, module in first.named_modules()}
    plain = tiny_output(pipe, "wan", steps=2)
    accelerate_pipeline(pipe, preset)
    pipe.transformer.blocks[0] = other.transformer.blocks[0]
    pipe.transformer = other.transformer
    accelerate_pipeline(pipe, preset)
    pipe.transformer = first
    restore_pipeline(pipe)
    first.blocks[0] = block
    assert all(find_hook(transformer) is None for transformer in (first, other.transformer))
    assert {name: set(vars(module)) for name, module in first.named_modules()} == attributes
    assert torch.equal(tiny_output(pipe, "wan", steps=2), plain)


HOOKED = {  # pipelines and presets that hook modules of every kind
    "transformer": ("flux", "exact"),
    "linear": ("flux", load_preset("exact", **{"linear.dtype": "int8"})),
    "linear-on-host": ("flux", load_preset("exact", linear={"dtype": "int8", "weights": "host"})),
    "parts": ("sd3", load_preset("exact", forecast={"level": "layer"})),
    "blocks": ("flux", "flux-flashomni-paper"),
    "attention": ("wan", load_preset("exact", model="wan", skip=SPARGE, blocks={"token_order": "hilbert"})),
    "control-net": ("flux-controlnet", "exact"),
}
OFFLOADED = ("before", "after", "in-between")


def hooked_modules(pipe, preset):
    """Modules that carry a hook of ours while the pipeline is accelerated, which it is not afterwards."""
    accelerate_pipeline(pipe, preset)
    parts = [part for part in vars(pipe).values() if isinstance(part, nn.Module)]
    modules = [module for part in parts for module in part.modules() if "_diffusers_hook" in vars(module)]
    restore_pipeline(pipe)
    return modules


def counting(cls, monkeypatch):
    """Puts a wrapper on the class's forward; the number of its calls, in a list of one."""
    calls, original = [0], cls.forward

    @functools.wraps(original)
    def counted(self, *args, **kwargs):
        calls[0] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", counted)
    return calls


@pytest.mark.parametrize("kind", HOOKED)
def test_a_forward_put_on_a_class_takes_effect_at_the_next_call(kind, monkeypatch):
    """A removed one no longer runs, whether it was added before or after the acceleration."""
    name, preset = HOOKED[kind]
    pipe = tiny_pipeline(name)
    plain = tiny_output(accelerate_pipeline(pipe, preset), name, steps=2)
    classes = {*map(type, hooked_modules(pipe, preset))}
    assert len(classes) > 1 or kind == "transformer"
    for put_on_first in (True, False):
        with monkeypatch.context() as patched:
            if not put_on_first:
                accelerate_pipeline(pipe, preset)
            calls = {cls: counting(cls, patched) for cls in classes if cls is not nn.Linear}
            if put_on_first:
                accelerate_pipeline(pipe, preset)
            torch.testing.assert_close(tiny_output(pipe, name, steps=2), plain, atol=1e-3, rtol=1e-3)  # fewer are fused
            assert all(count[0] > 0 for count in calls.values())
        before = {cls: count[0] for cls, count in calls.items()}
        tiny_output(pipe, name, steps=2)
        assert before == {cls: count[0] for cls, count in calls.items()}


@pytest.mark.parametrize(
    ("kind", "offloaded"),
    [*((kind, None) for kind in HOOKED), *((kind, when) for kind in ("blocks", "attention") for when in OFFLOADED)],
)
def test_a_restored_module_follows_its_class(kind, offloaded, monkeypatch):
    """Nothing of a forward that a class had while it was accelerated is left on a module, nor beneath offload."""
    name, preset = HOOKED[kind]
    pipe = tiny_pipeline(name)
    modules = hooked_modules(pipe, preset)
    classes, attributes = {*map(type, modules)}, [set(vars(module)) for module in modules]

    def offload(hook):
        for module in modules if offloaded is not None else ():
            add_hook_to_module(module, OffloadHook()) if hook else remove_hook_from_module(module)

    for change_on_first in (True, False):
        with monkeypatch.context() as patched:
            if change_on_first:
                for cls in classes:
                    counting(cls, patched)
            if offloaded in ("before", "in-between"):
                offload(True)
            accelerate_pipeline(pipe, preset)
            if offloaded == "after":
                offload(True)
            if offloaded == "in-between":
                offload(False)
            if not change_on_first:
                for cls in classes:
                    counting(cls, patched)
            if change_on_first:
                patched.undo()
            restore_pipeline(pipe)
            if offloaded in ("before", "after"):
                assert all(module._old_forward.__func__ is type(module).forward for module in modules)
                offload(False)
                for module in modules:
                    del module.forward  # accelerate leaves the class's
            assert attributes == [set(vars(module)) for module in modules]


def test_a_forward_of_the_modules_own_stays(monkeypatch):
    """A forward set on a module runs beneath the hook and stays afterwards, for any change of its class."""
    module = Plain()
    module.forward = original = lambda: ["own"]
    register_hook(module, Ours("ours"), "ours")
    monkeypatch.setattr(Plain, "forward", lambda self: ["class"])
    assert module.forward() == ["own", "ours"]
    remove_hook(module, "ours")
    assert module.forward is original


def test_a_name_that_is_taken_leaves_offload_as_it_was():
    """The second hook of a name is an error, after which the module is offloaded as before."""
    module = add_hook_to_module(Plain(), OffloadHook())
    register_hook(module, Ours("first"), "ours")
    offloading = module.forward
    with pytest.raises(ValueError, match="already exists"):
        register_hook(module, Ours("second"), "ours")
    assert module.forward is offloading and module.forward() == ["first"]


@pytest.mark.parametrize("first", [Ours, Around, Behind], ids=["ours", "theirs-around", "theirs-behind"])
def test_hooks_of_diffusers_keep_no_function_of_ours(first, monkeypatch):
    """While ours is on a module the class's forward of the moment runs; theirs then have the one of its removal."""
    second = Around if first is Ours else Ours
    module = hooked({"first": first, "second": second})
    monkeypatch.setattr(Plain, "forward", lambda self: ["new"])
    assert module.forward() == ["new", "first", "second"]
    remove_hook(module, "first" if first is Ours else "second")
    (reference,) = module._diffusers_hook._fn_refs
    assert (reference.original_forward or reference.forward).__func__ is Plain.forward
    assert module.forward() == ["new", "second" if first is Ours else "first"]


def test_an_acceleration_that_is_not_in_effect_says_so():
    """A replaced transformer, a hook that somebody took off, and a forward that goes around it."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "turbo")
    tiny_output(pipe, "flux", steps=STEPS)
    assert not pipe.dit_accel.report().notes
    first, pipe.transformer = pipe.transformer, tiny_pipeline("flux", seed=1).transformer
    with pytest.warns(UserWarning, match=r"pipe.transformer was replaced; call accelerate_pipeline\(pipe\) again"):
        assert any(note.startswith("not in effect: pipe.transformer") for note in pipe.dit_accel.report().notes)

    pipe.transformer = first
    tiny_output(pipe, "flux", steps=STEPS)
    assert not pipe.dit_accel.report().notes
    hooked_forward, first.forward = first.forward, type(first).forward.__get__(first)
    tiny_output(pipe, "flux", steps=STEPS)
    with pytest.warns(UserWarning, match="begun a later run, in which the transformer's hook was not"):
        pipe.dit_accel.report()

    first.forward = hooked_forward
    first._diffusers_hook.remove_hook("dit_accel")
    with pytest.warns(UserWarning, match="its hook on the transformer was removed"):
        pipe.dit_accel.report()


@pytest.mark.parametrize(
    ("name", "preset", "write"),
    [
        ("flux", "flux-flashomni-paper", copy.deepcopy),
        ("flux-controlnet", "exact", pickle.dumps),
        ("ltx", "turbo", partial(torch.save, f=io.BytesIO())),
    ],
)
def test_copying_waits_for_a_restored_pipeline(name, preset, write):
    """A copy's hooks would run the original's blocks. Weights and restored pipelines are copied and written as ever."""
    pipe = accelerate_pipeline(tiny_pipeline(name), preset)
    for item in (pipe, pipe.transformer):
        with pytest.raises(UnsupportedError, match=r"can't be copied or pickled.* call restore_pipeline\(pipe\) first"):
            write(item)
    write(pipe.transformer.state_dict())
    copied = write(restore_pipeline(pipe))
    if write is copy.deepcopy:
        assert equal_up_to_rounding(tiny_output(copied, name, steps=2), tiny_output(pipe, name, steps=2))


def _with_lora(pipe):
    pipe.load_lora_weights(tiny_flux_lora(pipe))
    return pipe


@pytest.mark.parametrize("version, name", [("0.35.0", "torch_dtype"), ("0.40.0.dev0", "dtype"), ("1.0.0", "dtype")])
def test_the_dtype_of_weights_has_the_name_of_the_version(monkeypatch, version, name):
    """diffusers before 0.40 takes no notice of `dtype`, and later ones warn of `torch_dtype`."""
    monkeypatch.setattr("diffusers.__version__", version)
    assert dtype_argument(torch.float16) == {name: torch.float16}
