"""FLOPs counted at the leaves: the cost of a plain run, and detection of skipped work of any kind."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from dit_accel import accelerated
from dit_accel.models import denoisers
from dit_accel.tools.measure.compare.work import WorkCounter
from tests.tiny import tiny_output, tiny_pipeline


class Block(nn.Module):
    """A projection, attention of 5 queries of 2 channels to 3 keys with values of 4, and an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.to_v = nn.Linear(8, 4)
        self.out = nn.Linear(4, 8)

    def forward(self, x):
        v = self.to_v(x)[:, None]
        return self.out(functional.scaled_dot_product_attention(v[..., :2], v[:, :, :3, :2], v[:, :, :3])[:, 0])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return functional.scaled_dot_product_attention(x, x, x)


def test_blocks_are_counted_with_their_attentions_and_nothing_else():
    """Two projections and an attention a block; embedders, and attentions outside of blocks, cost nothing."""
    model, x = Transformer(), torch.ones(1, 5, 3)
    counter = WorkCounter({"transformer": model})
    with counter.calibrating():
        model(x)
    assert counter.plain_flops == 2 * (2 * 5 * 8 * 4 + 2 * 5 * 4 * 8 + 2 * 5 * 3 * (2 + 4))
    assert all("forward" not in vars(module) for module in model.modules())
    with counter.counting() as fraction:
        model(x)
    assert fraction() == pytest.approx(1.0)
    model.blocks[0].forward = lambda x: x
    with counter.counting() as fraction:
        model(x)
    assert fraction() == pytest.approx(0.5)


def test_a_leaf_keeps_a_forward_of_its_own():
    """As under layerwise casting or offload; a cache that replaces a leaf's forward and does not call it skips work."""
    model, x = Transformer(), torch.ones(1, 5, 3)
    model.blocks[0].out.forward = replaced = model.blocks[0].out.forward
    counter = WorkCounter({"transformer": model})
    with counter.calibrating():
        model(x)
    assert [module for module in model.modules() if "forward" in vars(module)] == [model.blocks[0].out]
    assert model.blocks[0].out.forward is replaced
    with counter.counting() as fraction:
        below, model.blocks[1].out.forward = model.blocks[1].out.forward, lambda x: torch.zeros(1, 5, 8)
        model(x)
        model.blocks[1].out.forward = below
    assert fraction() == pytest.approx(1 - 2 * 5 * 4 * 8 / counter.plain_flops)


def test_removed_padding_of_a_text_costs_its_own_layer_alone():
    """A text's projection runs last before the attention, whose work does not shrink with the text's."""
    block, x = Block(), torch.ones(1, 5, 8)
    block.add_v, texts = nn.Linear(8, 4), iter((4, 1))
    block.to_v.register_forward_hook(lambda *_: (block.add_v(x[:, : next(texts)]), None)[1])
    counter = WorkCounter({"transformer": nn.ModuleDict({"blocks": nn.ModuleList([block])})})
    with counter.calibrating():
        block(x)
    with counter.counting() as fraction:
        block(x)
    assert fraction() == pytest.approx(1 - 2 * 3 * 8 * 4 / counter.plain_flops)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_leaves_and_report_agree_at_level_output(name):
    pipe = tiny_pipeline(name)
    counter = WorkCounter(denoisers(pipe))
    with counter.calibrating():
        tiny_output(pipe, name, steps=8)
    changes = {"schedule.target_error": 0.9, "schedule.warmup": 2}
    with counter.counting() as fraction, accelerated(pipe, "balanced", **changes):
        tiny_output(pipe, name, steps=8)
        report = pipe.dit_accel.report()
    assert 0 < report.computed_fraction < 1
    assert fraction() == pytest.approx(report.computed_fraction, rel=1e-3)
