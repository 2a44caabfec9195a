"""The script that measures token orders: what it counts, on which attentions, and that it leaves a pipeline alone."""

import sys
from pathlib import Path

import pytest
import torch

from dit_accel.layout import TokenLayout
from dit_accel.testing import tiny_output, tiny_pipeline

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from token_order import ORDERS, OrderMeasurement, measure, table  # noqa: E402


@pytest.mark.parametrize(
    "name, sites", [("wan", 2), ("hunyuan", 4), ("hunyuan-i2v", 4)], ids=["wan", "hunyuan", "hunyuan-i2v"]
)
def test_every_attention_over_the_clip_is_measured(name, sites):
    """Each site of each branch of each measured step counts once, and the run gives what it gives without."""
    pipe = tiny_pipeline(name)
    call = {"steps": 4, "height": 96, "width": 80, **({} if name.startswith("hunyuan") else {"guidance_scale": 5.0})}
    plain = tiny_output(pipe, name, **call)
    measurement = OrderMeasurement(pipe, [64], [0.0, 0.5], every=2)
    with measurement:
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


def test_blocks_of_like_tokens_are_similar_and_sparse():
    """Two kinds of tokens that attend to their own: sorted, blocks are alike and half the tiles go; mixed, neither."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.eye(2).repeat_interleave(128, 0) @ torch.eye(2, 16) * 12  # [256, 16]
    layout = TokenLayout(0, 256, 64)

    def figures(order):
        q = kinds[order].view(1, 256, 1, 16)
        (measured,) = measure(q, q, torch.randn(q.shape, generator=generator), layout, [0.2])
        return measured

    apart, mixed = figures(torch.arange(256)), figures(torch.arange(256).view(2, 128).T.flatten())
    assert apart["q_similarity"] == apart["k_similarity"] == pytest.approx(1.0)
    assert mixed["q_similarity"] == mixed["k_similarity"] == pytest.approx(0.5)
    assert (apart["sparsity"], mixed["sparsity"]) == (0.5, 0.0)
    assert apart["l1"] < 1e-3
