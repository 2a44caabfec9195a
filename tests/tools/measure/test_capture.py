"""The attention tap: the attention layers that it visits, its arguments, and its complete removal."""

from collections import Counter

import pytest
import torch

from dit_accel import accelerated
from dit_accel.errors import UnsupportedError
from dit_accel.models import denoisers
from dit_accel.tools.measure.capture import AttentionTap
from tests.models.tiny import pipeline
from tests.tiny import tiny_output

# (name, arguments of the call): 2 branches where there is guidance; widths and heights in pixels.
CALLS = {
    "flux": {},
    "flux-kontext": {},
    "flux-ip-adapter": {},
    "hunyuan": {"prompt": ["a red fox", "two blue whales asleep"]},  # with padding of unequal length
    "hunyuan-i2v": {},
    "wan": {"guidance_scale": 5.0},
    "wan-i2v-clip": {},
    "wan22": {},
}


def call(name: str, **changes) -> torch.Tensor:
    return tiny_output(pipeline(name), name, **{"steps": 3, **CALLS[name], **changes})


def attend(site, q, k, v):
    """The tapped attention, computed independently in float64."""
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / q.shape[-1] ** 0.5
    if site.kv_len is not None:
        padding = torch.arange(k.shape[1]) >= site.kv_len[:, None]
        scores.masked_fill_(padding[:, None, None], -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double()).to(q.dtype)


@pytest.mark.parametrize("name", CALLS)
def test_each_attention_is_visited_once(name):
    """Every block of each step and branch comes by in order, with the layout of its tokens; the run is not changed."""
    sites, plain = [], call(name)
    with AttentionTap(pipeline(name), lambda site, q, k, v: sites.append((site, q.shape)), block=64):
        tapped = call(name)
    assert torch.equal(tapped, plain) and torch.equal(call(name), plain)
    with accelerated(pipeline(name), "exact"):
        call(name)
        report = pipeline(name).dit_accel.report()
    visited = Counter((site.step, site.block) for site, _ in sites)
    assert set(visited.values()) in ({1}, {2}), "branches"
    expected = [
        (step, layer)
        for step in range(3)
        for layer, densities in zip(report.layers, report.density, strict=True)
        if densities[step] is not None
    ]
    assert list(visited) == expected
    for site, shape in sites:
        assert site.layout.tokens == shape[1] and site.layout.block == 64
        if site.grid is not None:
            assert torch.Size(site.grid).numel() == site.layout.vision
    assert all((site.grid is None) == name.startswith("flux") for site, _ in sites)


@pytest.mark.parametrize("name", ["flux", "flux-ip-adapter", "hunyuan", "hunyuan-i2v", "wan-i2v-clip"])
def test_what_comes_by_is_the_attention(name):
    """Attention of q, k, v and kv_len in float64, put in place of the block's own, gives the plain result."""
    plain = call(name)
    with AttentionTap(pipeline(name), attend):
        replaced = call(name)
    assert (replaced - plain).norm() / plain.norm() < 1e-5
    with AttentionTap(pipeline(name), lambda site, q, k, v: torch.zeros_like(q)):
        assert (call(name) - plain).norm() / plain.norm() > 1e-3


@pytest.mark.parametrize("name", ["flux", "hunyuan", "wan"])
def test_vision_lies_where_the_layout_says(name):
    """Another prompt changes text rows of the first block's queries (Wan has none), other noise vision rows."""
    queries = {}

    def first_of(key, **changes):
        def visit(site, q, k, v):
            queries.setdefault(key, (site.layout, q))

        with AttentionTap(pipeline(name), visit):
            call(name, prompt=changes.pop("prompt", "a red fox"), steps=2, **changes)

    first_of("plain")
    first_of("prompt", prompt="a dog asks!")
    first_of("noise", seed=1)
    layout, plain = queries["plain"]
    vision = torch.zeros(layout.tokens, dtype=torch.bool)
    vision[layout.vision_start :][: layout.vision] = True
    changed = {key: (q != plain).any(dim=3).any(dim=2)[0] for key, (_, q) in queries.items()}
    assert changed["noise"][vision].all()
    assert not changed["noise"][~vision].any()
    assert changed["prompt"][~vision].any() or not layout.text


def test_a_visitor_that_fails_leaves_no_hooks():
    plain = call("flux")

    def visit(site, q, k, v):
        raise KeyError("mine")

    with AttentionTap(pipeline("flux"), visit):
        with pytest.raises(KeyError, match="mine"):
            call("flux")
        model = pipeline("flux").transformer
        width = model.config.num_attention_heads * model.config.attention_head_dim
        model.transformer_blocks[0].attn(torch.ones(1, 16, width), torch.ones(1, 8, width))  # by itself: not visited
    assert torch.equal(call("flux"), plain)
    modules = [module for model in denoisers(pipeline("flux")).values() for module in model.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_what_can_not_be_tapped_is_refused():
    """Unknown blocks, accelerated pipelines and attention that bypasses torch's give errors with a solution."""
    with pytest.raises(UnsupportedError, match="blocks of HunyuanVideoFramepackTransformer3DModel are not known"):
        AttentionTap(pipeline("framepack"), attend)
    with (
        accelerated(pipeline("flux"), "exact"),
        pytest.raises(UnsupportedError, match="got an accelerated one: call restore_pipeline"),
    ):
        AttentionTap(pipeline("flux"), attend).__enter__()
    attn = pipeline("flux").transformer.transformer_blocks[1].attn
    before, attn.processor = attn.processor, lambda attn, x, context, *_: (x, context)
    try:
        with (
            pytest.raises(UnsupportedError, match=r"transformer_blocks\.1 attends without calling torch"),
            AttentionTap(pipeline("flux"), lambda *_: None),
        ):
            call("flux")
    finally:
        attn.processor = before
