"""Group offload of diffusers moves weights in computed steps only, whether it was enabled first or later."""

import threading
from unittest.mock import Mock

import pytest
import torch
from diffusers.hooks import group_offloading

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.models.hooks import find_hook
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_output, tiny_pipeline

CPU, STEPS = torch.device("cpu"), 6
EVERY_THIRD = load_preset("balanced", schedule={"control": "interval", "warmup": 2, "interval": 3, "cooldown": 0})


@pytest.fixture
def moved(monkeypatch):
    """Numbers of weights that were moved to the device; nothing is moved, because host and device are the CPU."""
    sizes = []

    def onload(group):
        modules = [weight for module in group.modules for weight in module.parameters()]
        sizes.extend(weight.numel() for weight in (*modules, *group.parameters))

    monkeypatch.setattr(group_offloading.ModuleGroup, "onload_", onload)
    monkeypatch.setattr(group_offloading.ModuleGroup, "offload_", lambda group: None)
    monkeypatch.setattr(group_offloading.ModuleGroup, "_init_cpu_param_dict", lambda group: {})
    return sizes


def offload(pipe, kind, *, streamed):
    """``enable_group_offload``, which refuses streams on a CPU."""
    kind, stream = group_offloading.GroupOffloadingType(kind), Mock() if streamed else None
    config = group_offloading.GroupOffloadingConfig(CPU, CPU, kind, streamed, False, False, 1, stream=stream)
    group_offloading._apply_group_offloading(pipe.transformer, config)


def moved_by_step(pipe, moved):
    """Modes of the steps of a call, and the number of weights that each moved."""
    by_step = []

    def count(pipe, step, timestep, tensors):
        by_step.append(sum(moved))
        moved.clear()
        return tensors

    moved.clear()
    tiny_output(pipe, "flux", steps=STEPS, callback_on_step_end=count)
    return [step.mode for step in pipe.dit_accel.report().steps], by_step


@pytest.mark.parametrize(
    ("order", "kind", "streamed"),
    [
        ("before", "block_level", True),
        ("before", "leaf_level", False),
        ("after", "block_level", False),
        ("after", "leaf_level", True),
    ],
)
def test_a_forecast_step_moves_no_weights(pipe, moved, order, kind, streamed):
    """Also if offload is enabled after the acceleration, as loading a LoRA does: its hooks are above ours then."""
    if order == "before":
        offload(pipe, kind, streamed=streamed)
    accelerate_pipeline(pipe, EVERY_THIRD)
    if order == "after":
        offload(pipe, kind, streamed=streamed)
    modes, by_step = moved_by_step(pipe, moved)
    weights = sum(weight.numel() for weight in pipe.transformer.parameters())
    assert modes == ["full", "full", "update", "dispatch", "dispatch", "update"]
    assert [count >= weights for count in by_step] == [mode != "dispatch" for mode in modes]
    assert [count for mode, count in zip(modes, by_step, strict=True) if mode == "dispatch"] == [0, 0]


@pytest.mark.parametrize("streamed", [False, True], ids=["at-once", "streamed"])
def test_blocks_that_are_offloaded_already_are_replaced_and_prefetched(pipe, moved, streamed):
    """Their weights move before our hooks run, which replace the blocks, and streams see the order of all blocks."""
    offload(pipe, "block_level", streamed=streamed)
    plain = tiny_output(tiny_pipeline("flux"), "flux", steps=STEPS)
    accelerate_pipeline(pipe, "flux-taylorseer", schedule={"interval": 2})
    tiny_output(pipe, "flux", steps=STEPS)
    report = pipe.dit_accel.report()
    assert report.computed_fraction < 1 and report.fallbacks == []
    transformer = pipe.transformer
    blocks = (transformer, *transformer.transformer_blocks, *transformer.single_transformer_blocks)
    following = [block._diffusers_hook.get_hook("group_offloading").next_group is not None for block in blocks]
    assert following == [streamed] * (len(blocks) - 1) + [False]
    assert equal_up_to_rounding(tiny_output(restore_pipeline(pipe), "flux", steps=STEPS), plain)


@pytest.mark.parametrize("offloaded", [False, True], ids=["plain", "offloaded"])
def test_a_call_ends_well_if_another_thread_restores_the_pipeline_meanwhile(moved, offloaded):
    pipe, threads = tiny_pipeline("flux"), []
    plain, transformer = tiny_output(pipe, "flux", steps=2), pipe.transformer
    accelerate_pipeline(pipe, "exact")
    if offloaded:
        offload(pipe, "block_level", streamed=False)

    def restore(*_):
        if not threads:
            threads.append(threading.Thread(target=restore_pipeline, args=(pipe,)))
            threads[0].start()
            threads[0].join()

    handle = transformer.proj_out.register_forward_hook(restore)
    assert torch.equal(tiny_output(pipe, "flux", steps=2), plain)
    handle.remove()
    assert find_hook(transformer) is None and torch.equal(tiny_output(pipe, "flux", steps=2), plain)
