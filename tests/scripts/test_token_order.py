"""The script that measures token orders: its figures, the measured attentions, and an unchanged pipeline."""

import pytest
import torch

from dit_accel.kernels import attention, pooled_map
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Skip
from dit_accel.sparse.policies import plan
from dit_accel.tools.capture import AttentionTap
from scripts.research.token_order import ORDERS, OrderMeasurement, measure, table
from tests.tiny import tiny_output, tiny_pipeline


@pytest.mark.parametrize(
    "name, sites", [("wan", 2), ("hunyuan", 4), ("hunyuan-i2v", 4)], ids=["wan", "hunyuan", "hunyuan-i2v"]
)
def test_every_attention_over_the_clip_is_measured(name, sites):
    """Each site of each branch of each measured step counts once, and the run's result stays the same."""
    pipe = tiny_pipeline(name)
    call = {"steps": 4, "height": 96, "width": 80, **({} if name.startswith("hunyuan") else {"guidance_scale": 5.0})}
    plain = tiny_output(pipe, name, **call)
    measurement = OrderMeasurement([64], [0.0, 0.5], every=2)
    with AttentionTap(pipe, measurement.visit):
        measured = tiny_output(pipe, name, **call)
    assert torch.equal(measured, plain)
    assert torch.equal(tiny_output(pipe, name, **call), plain)
    results = measurement.results()
    branches = 2 if name == "wan" else 1
    assert [(r["order"], r["tau_kv"]) for r in results] == [(order, tau) for tau in (0.0, 0.5) for order in ORDERS]
    assert {r["attentions"] for r in results} == {2 * branches * sites}
    assert all(abs(r["sparsity"]) < 1e-6 and r["l1"] < 1e-5 for r in results if r["tau_kv"] == 0.0)
    assert all(r["sparsity"] > 0 and r["l1"] > 1e-3 for r in results if r["tau_kv"] == 0.5)
    assert len(table(results).splitlines()) == 2 + len(results)


def test_heads_are_measured_in_turn():
    """Two of three heads are measured at each attention, and the next attention continues with the third."""
    pipe, seen = tiny_pipeline("wan"), []
    measurement = OrderMeasurement([64], [0.0], heads=2)

    def visit(site, q, k, v):
        before = len(measurement.figures["raster", 64, 0.0])
        measurement.visit(site, q, k, v)
        (figures,) = measurement.figures["raster", 64, 0.0][before:]
        each = pooled_map(q, k, 64).q_similarity[..., site.layout.vision_blocks].mean(dim=(0, 2))
        seen.append((figures["q_similarity"], each))

    with AttentionTap(pipe, visit, block=64):
        tiny_output(pipe, "wan", steps=2)
    for visits, (measured, each) in enumerate(seen):
        chosen = [2 * visits % 3, (2 * visits + 1) % 3]
        assert measured == pytest.approx(each[chosen].mean().item())
        assert measured != pytest.approx(each.mean().item())


def test_blocks_of_like_tokens_are_similar_and_sparse():
    """Two kinds of tokens that attend to their own: sorted, blocks are similar and half the tiles skipped; else not."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.eye(2).repeat_interleave(128, 0) @ torch.eye(2, 16) * 12  # [256, 16]
    layout = TokenLayout(0, 256, 64)

    def figures(order):
        q = kinds[order].view(1, 256, 1, 16)
        v = torch.randn(q.shape, generator=generator)
        (measured,) = measure(q, q, v, attention(q, q, v, plan(q, q, Skip())), layout, [0.2])
        return measured

    apart, mixed = figures(torch.arange(256)), figures(torch.arange(256).view(2, 128).T.flatten())
    assert apart["q_similarity"] == apart["k_similarity"] == pytest.approx(1.0)
    assert mixed["q_similarity"] == mixed["k_similarity"] == pytest.approx(0.5)
    assert (apart["sparsity"], mixed["sparsity"]) == (0.5, 0.0)
    assert apart["l1"] < 1e-3
