"""A pipeline that drops a part to make room, or replaces it, frees it as the plain pipeline does."""

import gc
import weakref

import pytest

from dit_accel import accelerate_pipeline, restore_pipeline
from tests.tiny import tiny_output, tiny_pipeline

DROPPED = "the pipeline has dropped its transformer"
REPLACED = "pipe.transformer was replaced"
CASES = {
    "flux": ("flux", "transformer", {}),
    "flux-layer": ("flux", "transformer", {"level": "layer"}),
    "wan": ("wan", "transformer", {}),
    "controlled": ("flux-controlnet", "transformer", {}),
    "control-net": ("flux-controlnet", "controlnet", {}),
}


def is_freed_once(pipe, part, successor):
    """Return True if a part is freed once another object takes its place."""
    old = weakref.ref(getattr(pipe, part))
    setattr(pipe, part, successor)
    gc.collect()
    return old() is None


@pytest.mark.parametrize("replaces", [False, True], ids=["dropped", "replaced"])
@pytest.mark.parametrize("name, part, changes", CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore:not in effect")
def test_a_part_that_the_pipeline_drops_is_freed(name, part, changes, replaces):
    """Only the pipeline keeps its parts alive, and the report says if nothing is accelerated any more."""
    pipe = accelerate_pipeline(tiny_pipeline(name), "turbo", **changes)
    tiny_output(pipe, name, steps=3)
    assert is_freed_once(pipe, part, getattr(tiny_pipeline(name, seed=1), part) if replaces else None)
    why = [note for note in pipe.dit_accel.report().notes if note.startswith("not in effect")]
    assert len(why) == (part == "transformer") and all((REPLACED if replaces else DROPPED) in note for note in why)
    restore_pipeline(pipe)
    assert not hasattr(pipe, "dit_accel")


def test_an_expert_that_the_pipeline_drops_is_freed():
    """Wan 2.2 needs its expert for high noise only in the first steps; the other one stays accelerated."""
    pipe = tiny_pipeline("wan")
    pipe.transformer_2 = tiny_pipeline("wan", seed=1).transformer
    pipe.register_to_config(boundary_ratio=0.5)
    accelerate_pipeline(pipe, "turbo")
    tiny_output(pipe, "wan", steps=6)
    assert is_freed_once(pipe, "transformer", None)
    assert not [note for note in pipe.dit_accel.report().notes if note.startswith("not in effect")]
    restore_pipeline(pipe)
