"""Leftovers on a pipeline are found and removed."""

import types

import torch

from dit_accel.pipeline import accelerated
from dit_accel.tools.measure.compare.snapshot import Snapshot
from tests.tiny import tiny_output


def test_everything_that_was_put_on_comes_off(pipe):
    """Changed attributes of modules, classes and the pipeline come back, new ones go. A plain run leaves nothing."""
    pipe.transformer.mark = "here"
    tiny_output(pipe, "flux", steps=2)
    snapshot = Snapshot(pipe)
    tiny_output(pipe, "flux", steps=2)
    assert snapshot.restore() == {}
    transformer, cls = pipe.transformer, type(pipe)
    first_forward, first_call, blocks = transformer.forward, cls.__call__, transformer.transformer_blocks
    transformer.forward = types.MethodType(lambda self: None, transformer)
    blocks[0].attn.forward = None
    blocks[0]._is_patched = True
    cls.__call__ = lambda self: None
    pipe._manager = object()
    assert snapshot.restore() == {"forward": 2, "_is_patched": 1, "__call__": 1, "_manager": 1}
    assert cls.__call__ is first_call and transformer.forward == first_forward
    assert not hasattr(pipe, "_manager") and "forward" not in vars(blocks[0].attn)
    del transformer.mark
    assert snapshot.restore() == {} and transformer.mark == "here"
    transformer.enable_group_offload(torch.device("cpu"), num_blocks_per_group=1)
    snapshot = Snapshot(pipe)
    with accelerated(pipe, "exact"):
        pass  # diffusers wraps the forwards of hooked blocks anew
    assert snapshot.restore() == {}
